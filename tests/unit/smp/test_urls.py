"""URLs are distinguished from paths, and their passwords are hidden."""

import pytest

from ftrun.urls import below, is_url, located, password_of, without_password


@pytest.mark.parametrize("text", ["s3://bucket", "gs://b/c", "abfs+x://y", "ftp://me:pw@h:21/x"])
def test_urls_are_left_as_they_are(text: str) -> None:
    assert is_url(text)
    assert located(text, cwd="/here") == text


@pytest.mark.parametrize("text", ["/data/run", "run", "c://x", "a:b", "S3://b", "./s3://b"])
def test_all_else_is_a_path(text: str) -> None:
    assert not is_url(text)
    assert located(text, cwd="/here").startswith("/")


def test_a_file_url_is_a_path() -> None:
    assert located("file:///data/a%20b", cwd="/here") == "/data/a b"
    assert not is_url(located("file://data", cwd="/here"))


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("ftp://me:s3cret@h:21/x", "ftp://me:***@h:21/x", "s3cret"),
        ("ftp://me:a:b@h/x", "ftp://me:***@h/x", "a:b"),
        ("ftp://:pw@h/x", "ftp://:***@h/x", "pw"),
        ("ftp://me@h:21/x", "ftp://me@h:21/x", ""),
        ("s3://bucket/x:y@z", "s3://bucket/x:y@z", ""),
        ("/a/path", "/a/path", ""),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str, password: str) -> None:
    assert without_password(url) == shown
    assert password_of(url) == password


def test_a_name_below_a_url() -> None:
    assert below("s3://b/x/", "y") == below("s3://b/x", "y") == "s3://b/x/y"

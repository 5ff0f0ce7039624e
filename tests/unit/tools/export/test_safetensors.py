"""Every tensor has its bytes in one file, none overlaps another, and order does not matter."""

import json

from hypothesis import given
from hypothesis import strategies as st

from ftrun.snapshot.layout import ITEM_BYTES, public_shape
from ftrun.tools.export.safetensors import PlannedFile, TensorDescription, index_of, plan_files

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes)
tensors = st.dictionaries(
    st.text("ab.01", min_size=1, max_size=4), kinds.filter(lambda one: one[0] != "F4" or one[1])
).map(lambda found: [TensorDescription(name, *kind) for name, kind in found.items()])


def header_of(file: PlannedFile) -> dict[str, dict[str, object]]:
    assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
    found: dict[str, dict[str, object]] = json.loads(file.header[8:])
    return found


@given(tensors, st.integers(1, 300), st.randoms())
def test_any_tensors_find_their_places(
    given: list[TensorDescription], limit: int, random: object
) -> None:
    files = plan_files(given, limit_bytes=limit, tied={})
    random.shuffle(given)  # type: ignore[attr-defined]
    assert plan_files(given, limit_bytes=limit, tied={}) == files
    assert [file.name for file in files] == [
        f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)
    ]
    assert sorted(name for file in files for name in file.places) == sorted(t.name for t in given)
    by_name = {one.name: one for one in given}
    for file in files:
        end = len(file.header)
        for name, at in file.places.items():  # in the order of their offsets
            one = by_name[name]
            assert at == end
            assert (at - len(file.header)) % ITEM_BYTES[one.dtype] == 0
            end += one.num_bytes
            said = header_of(file)[name]
            assert said["data_offsets"] == [at - len(file.header), end - len(file.header)]
            assert (said["dtype"], said["shape"]) == (one.dtype, public_shape(one.dtype, one.shape))
        assert file.num_bytes == end
        assert (
            end - len(file.header) <= limit
            or sum(by_name[n].num_bytes > 0 for n in file.places) == 1
        )
    index = json.loads(index_of(files))
    assert index["metadata"]["total_size"] == sum(one.num_bytes for one in given)
    assert index["weight_map"] == {name: file.name for file in files for name in file.places}


def test_each_of_two_values_in_a_byte_counts_in_the_shape() -> None:
    (file,) = plan_files([TensorDescription("w", "F4", (5, 3))], limit_bytes=100, tied={})
    assert header_of(file)["w"] == {"dtype": "F4", "shape": [5, 6], "data_offsets": [0, 15]}


def test_layer_ten_comes_behind_layer_two() -> None:
    given = [TensorDescription(f"layer.{at}", "F32", (1,)) for at in (10, 2, 1)]
    files = plan_files(given, limit_bytes=4, tied={})
    assert [list(file.places) for file in files] == [["layer.1"], ["layer.2"], ["layer.10"]]


def test_other_names_of_a_tied_tensor_are_where_it_is() -> None:
    given = [TensorDescription("a", "F32", (1,)), TensorDescription("b", "F32", (1,))]
    one, two = plan_files(given, limit_bytes=4, tied={"c": "a", "d": "a"})
    assert header_of(one)["__metadata__"] == {"format": "pt", "c": "a", "d": "a"}
    assert header_of(two)["__metadata__"] == {"format": "pt"}

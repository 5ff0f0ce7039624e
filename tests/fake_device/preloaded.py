"""Registers the fake device when it is imported, as torch registers a GPU: for `--preload`."""

from fake_device import fake

fake.load()

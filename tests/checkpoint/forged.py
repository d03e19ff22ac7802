"""Shares and manifests that somebody has changed, with all digests right, as who wants to be believed would do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash

from stretto.checkpoint.manifest import FILE

SHARE = "0.share"


def extents(content: bytes) -> tuple[Any, list[Any], list[tuple[int, int]]]:
    """Return what a share's head says, header and index, and where the content of each entry lies."""
    end = 32 + int.from_bytes(content[8:16])
    header, index = json.loads(content[32:end])
    places = []
    for _, kind, runs, _ in index:
        size = getattr(torch, kind[1]).itemsize if kind else 1
        begin = end + -end % 64
        end = begin + size * sum(numel for _, numel in runs)
        places.append((begin, end))
    return header, index, places


def signed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest."""
    content = json.loads((path / FILE).read_text())
    del content["digest"]
    change(content)
    content["digest"] = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    (path / FILE).write_text(json.dumps(content))


def forged(path: Path, change: Callable[[list[Any], dict[str, list[Any]], dict[str, bytes]], object]) -> None:
    """Change the share of rank 0: header, index by name, and contents by name."""
    content = (path / SHARE).read_bytes()
    header, index, places = extents(content)
    contents = {entry[0]: content[begin:end] for entry, (begin, end) in zip(index, places, strict=True)}
    change(header, {entry[0]: entry for entry in index}, contents)
    head = json.dumps([header, index]).encode()
    made = content[:8] + len(head).to_bytes(8) + xxhash.xxh3_128_digest(head) + head
    for one in contents.values():
        made += bytes(-len(made) % 64) + one
    (path / SHARE).write_bytes(made)
    share = [len(made), xxhash.xxh3_128_hexdigest(head)]
    signed(path, lambda manifest: manifest["shares"].__setitem__(0, share))


def planted(path: Path, name: str, content: bytes) -> None:
    """Put bytes in the place of an entry."""

    def change(_: Any, index: dict[str, list[Any]], contents: dict[str, bytes]) -> None:
        contents[name] = content
        index[name][2:] = [[[0, len(content)]], xxhash.xxh3_64_hexdigest(content)]

    forged(path, change)

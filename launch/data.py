"""The data contract: checks on training data, and packing of its documents into rows.

A token file is `NAME.bin` (memory-mapped uint16 or uint32 ids) or `NAME.parquet` (a column `tokens`, one document a
row), next to its receipt `NAME.json`: schema, format, dtype, tokens, bos_id, vocab_size and the sha256 of the file.
Documents start at each BOS. Data that fails a check is refused with DataError, in one line; random ids are accepted
only for a smoke test.

B batch, T tokens of a row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from launch.caches import sha256

SCHEMA = "bumpgate-tokens-1"
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
FIELDS = dict.fromkeys(("schema", "format", "dtype", "sha256"), str) | dict.fromkeys(
    ("tokens", "bos_id", "vocab_size"), int
)
CHUNK = 1 << 22  # ids in memory at once in a scan of a memory-mapped file

# The byte-level tokenizer of the shipped corpus: the ids below 48 are the model's special tokens, byte b is 48 + b.
BOS, EOT, BYTE_OFFSET = 2, 3, 48


class Source(Protocol):
    """Batches of token ids (B,T) int64 on the CPU, and their position as plain numbers and lists."""

    def __next__(self) -> Tensor: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class DataError(ValueError):
    """Data that breaks the contract. The message is one line."""


def encode(text: bytes) -> list[int]:
    """Encode a document: BOS, one id per byte, EOT."""
    return [BOS, *(BYTE_OFFSET + byte for byte in text), EOT]


def decode(ids: list[int]) -> bytes:
    """Return the bytes among `ids`; special tokens are dropped."""
    return bytes(i - BYTE_OFFSET for i in ids if BYTE_OFFSET <= i < BYTE_OFFSET + 256)


def read_receipt(path: Path) -> dict[str, Any]:
    """Read the receipt next to a token file. Raises DataError if a field is missing or has the wrong type."""
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise DataError(
            f"{path}: no receipt ({error.strerror}): a token file needs one to be trained on"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: the receipt is not JSON ({error})") from None
    for name, kind in FIELDS.items():
        if not isinstance(fields, dict) or type(fields.get(name)) is not kind:
            raise DataError(f"{path}: the receipt's {name!r} is missing or not of type {kind.__name__}")
    if fields["schema"] != SCHEMA:
        raise DataError(f"{path}: schema {fields['schema']!r}, this reader supports {SCHEMA!r}")
    if fields["dtype"] not in DTYPES:
        raise DataError(f"{path}: dtype {fields['dtype']!r}, expected one of {', '.join(DTYPES)}")
    return fields


def read_parquet(path: Path, dtype: type) -> np.ndarray:
    """Read the ids of a parquet file, documents concatenated; pyarrow is imported only here."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: parquet needs pyarrow, which is missing: pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except ValueError as error:
        raise DataError(f"{path}: not parquet ({str(error).splitlines()[0]})") from None
    if "tokens" not in file.schema_arrow.names:
        raise DataError(f"{path}: no column 'tokens'")
    lists = (batch.column("tokens").flatten() for batch in file.iter_batches(columns=["tokens"]))
    pieces = [ids.to_numpy(zero_copy_only=False) for ids in lists]
    wide = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    if wide.size and not 0 <= wide.min() <= wide.max() <= np.iinfo(dtype).max:
        raise DataError(f"{path}: ids outside {np.dtype(dtype).name}, the receipt's dtype")
    return wide.astype(dtype)


class TokenFile:
    """A checked token file: `ids` (N,) memory-mapped, `starts` the position of each BOS, `fields` the receipt.

    `path` is the file, or a directory with one receipt. Raises DataError on a wrong size, hash or id, and on a file
    that does not begin with BOS.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        if path.is_dir():
            receipts = sorted(path.glob("*.json"))
            if len(receipts) != 1:
                raise DataError(f"{path}: {len(receipts)} receipts (*.json), expected exactly one token file")
            path = receipts[0]
        self.fields = read_receipt(path.with_suffix(".json"))
        suffix = {"bin": ".bin", "parquet": ".parquet"}.get(self.fields["format"])
        if suffix is None:
            raise DataError(f"{path}: format {self.fields['format']!r}, expected bin or parquet")
        self.path = path.with_suffix(suffix)
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file, though its receipt exists")
        if sha256(self.path) != self.fields["sha256"]:
            raise DataError(
                f"{self.path}: the sha256 is not the receipt's: the file changed, create it again"
            )
        self.ids = self._read(DTYPES[self.fields["dtype"]])
        self.bos_id, self.vocab_size = self.fields["bos_id"], self.fields["vocab_size"]
        self.starts = self._scan()

    def _read(self, dtype: type) -> np.ndarray:
        if self.path.suffix == ".parquet":
            ids = read_parquet(self.path, dtype)
        elif self.path.stat().st_size % np.dtype(dtype).itemsize:
            raise DataError(f"{self.path}: the size is not a multiple of {self.fields['dtype']}")
        else:
            ids = np.memmap(self.path, dtype, mode="r") if self.path.stat().st_size else np.zeros(0, dtype)
        if len(ids) != self.fields["tokens"]:
            raise DataError(f"{self.path}: {len(ids)} tokens, the receipt states {self.fields['tokens']}")
        return ids

    def _scan(self) -> np.ndarray:
        found = []
        for at in range(0, len(self.ids), CHUNK):
            piece = self.ids[at : at + CHUNK]
            if piece.max() >= self.vocab_size:
                raise DataError(f"{self.path}: id {piece.max()} in a vocabulary of {self.vocab_size}")
            found.append(at + np.flatnonzero(piece == self.bos_id))
        starts = np.concatenate(found) if found else np.zeros(0, np.int64)
        if not len(starts):
            raise DataError(f"{self.path}: no BOS ({self.bos_id}): documents cannot be distinguished")
        if starts[0] != 0:
            raise DataError(f"{self.path}: begins with id {self.ids[0]}, not with BOS ({self.bos_id})")
        return starts


def receipt(source: object) -> dict[str, Any]:
    """Return the data entry of a record: `kind` is "tokens" for a checked file, "synthetic" for random ids.

    Raises DataError on any other source.
    """
    if isinstance(source, SyntheticBatches):
        known = {name: getattr(source, name) for name in ("vocab_size", "bos_id", "seed")}
        return {"kind": "synthetic", **known}
    if isinstance(source, PackedBatches):
        packing = {name: source.setup[name] for name in ("batch", "tokens", "seed")}
        return {**receipt(source.file), "packing": packing}
    if isinstance(source, TokenFile):
        return {"kind": "tokens", "file": source.path.name, "documents": len(source.starts), **source.fields}
    raise DataError(f"{type(source).__name__} is not a checked token file: it has no receipt")


class PackedBatches(Iterator[Tensor]):
    """Endless batches of rows that begin with BOS, over all documents in a new order each epoch.

    A document longer than a row is cut into pieces, each with its own BOS. A row takes the oldest waiting piece, then
    repeatedly the longest that still fits (best fit). The rest is filled with BOS: documents without a target.
    """

    WAITING = 64  # candidate pieces for a row

    def __init__(self, file: TokenFile, batch: int, tokens: int, seed: int) -> None:
        if batch < 1 or tokens < 2:
            raise DataError(f"batch {batch}, {tokens} tokens a row: out of range")
        self.file = file
        self.setup = {"batch": batch, "tokens": tokens, "seed": seed}
        self.setup["sha256"] = file.fields["sha256"]
        self.batch, self.tokens, self.seed = batch, tokens, seed
        self.pieces = self._cut()
        self.counts: Counter[str] = Counter()
        self.epoch, self.cursor, self.waiting = 0, 0, list[int]()
        self.order = self._shuffled()

    def _cut(self) -> list[tuple[int, int]]:
        """Return (first, last) positions of each piece's ids, without its BOS; none for a document of one token."""
        stops = np.append(self.file.starts[1:], len(self.file.ids))
        pieces = []
        for start, stop in zip(self.file.starts.tolist(), stops.tolist()):
            body = range(start + 1, stop, self.tokens - 1)
            pieces += [(first, min(first + self.tokens - 1, stop)) for first in body]
        if not pieces:
            raise DataError(f"{self.file.path}: no document has a target")
        return pieces

    def _shuffled(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(len(self.pieces), generator=generator).tolist()

    def _refill(self) -> None:
        while len(self.waiting) < self.WAITING:
            if self.cursor == len(self.order):
                self.epoch, self.cursor = self.epoch + 1, 0
                self.order = self._shuffled()
            self.waiting.append(self.order[self.cursor])
            self.cursor += 1

    def _length(self, piece: int) -> int:
        first, last = self.pieces[piece]
        return 1 + last - first

    def _row(self) -> np.ndarray:
        row = np.full(self.tokens, self.file.bos_id, np.int64)
        self._refill()
        at, index = 0, 0
        while index >= 0:
            first, last = self.pieces[self.waiting.pop(index)]
            row[at + 1 : at + 1 + last - first] = self.file.ids[first:last]
            at += 1 + last - first
            self.counts["cut"] += int(self.file.ids[first - 1] != self.file.bos_id)
            free = self.tokens - at
            fitting = [i for i, piece in enumerate(self.waiting) if self._length(piece) <= free]
            index = max(fitting, key=lambda i: self._length(self.waiting[i]), default=-1)
        self.counts["padding"] += self.tokens - at
        self.counts["rows"] += 1
        return row

    def __next__(self) -> Tensor:
        """Return ids (B,T) int64 on the CPU."""
        return torch.from_numpy(np.stack([self._row() for _ in range(self.batch)]))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream as plain numbers and lists."""
        place = {"epoch": self.epoch, "cursor": self.cursor, "waiting": list(self.waiting)}
        return {"setup": dict(self.setup), "counts": dict(self.counts), **place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`. Raises DataError if it is of another file, packing or seed."""
        for name, value in self.setup.items():
            if state["setup"].get(name) != value:
                raise DataError(f"cannot resume: {name} was {state['setup'].get(name)}, now it is {value}")
        self.counts = Counter(state["counts"])
        self.epoch, self.cursor, self.waiting = state["epoch"], state["cursor"], list(state["waiting"])
        self.order = self._shuffled()


class SyntheticBatches(Iterator[Tensor]):
    """Random ids with a BOS at each row's start: a smoke test of the step, not training data."""

    def __init__(self, vocab_size: int, batch: int, tokens: int, seed: int, bos_id: int = BOS) -> None:
        self.vocab_size, self.shape, self.seed, self.bos_id = vocab_size, (batch, tokens), seed, bos_id
        self.drawn = 0

    def __next__(self) -> Tensor:
        """Return ids (B,T) int64 on the CPU."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.drawn)
        self.drawn += 1
        ids = torch.randint(self.vocab_size, self.shape, generator=generator)
        ids[:, 0] = self.bos_id
        return ids

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]

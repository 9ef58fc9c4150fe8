"""The data contract (rule X13): a broken token file is rejected, rows are packed as specified, a stream resumes.

B batch, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launch.data import (
    BOS,
    SCHEMA,
    DataError,
    PackedBatches,
    SyntheticBatches,
    TokenFile,
    decode,
    encode,
    receipt,
)
from model.hybrid import documents, next_token_targets
from suites.launch.trainers import CORPUS
from suites.support.child import ROOT
from suites.support.lanes import lanes
from suites.support.planted import planted

pytestmark = [lanes("cpu"), pytest.mark.usefixtures("lane")]


def written(
    folder: Path, ids: list[int], raw: bytes | None = None, name: str = "t.bin", **fields: Any
) -> Path:
    """Write a token file and its receipt; `fields` overwrite the true values."""
    raw = np.array(ids, np.uint16).tobytes() if raw is None else raw
    path = folder / name
    path.write_bytes(raw)
    true = {"schema": SCHEMA, "format": path.suffix[1:], "dtype": "uint16", "tokens": len(ids), "bos_id": BOS}
    true |= {"vocab_size": 512, "sha256": hashlib.sha256(raw).hexdigest()}
    kept = {key: value for key, value in (true | fields).items() if value is not None}
    path.with_suffix(".json").write_text(json.dumps(kept))
    return path


def lengths_file(folder: Path, lengths: list[int]) -> TokenFile:
    """Write documents of these lengths, BOS included; the other ids of a document all equal its own id."""
    ids = [i for number, length in enumerate(lengths) for i in [BOS, *[10 + number] * (length - 1)]]
    return TokenFile(written(folder, ids))


@pytest.mark.parametrize(
    ("ids", "fields", "message"),
    [
        ([2, 9, 600], {}, "id 600 in a vocabulary of 512"),
        ([2, 511, 512], {}, "id 512 in a vocabulary of 512"),
        ([9, 9, 9], {}, r"no BOS \(2\)"),
        ([9, 2, 9], {}, r"begins with id 9, not with BOS \(2\)"),
        ([], {}, "no BOS"),
        ([2, 9], {"tokens": 3}, "2 tokens, the receipt states 3"),
        ([2, 9], {"sha256": "0" * 64}, "sha256 is not the receipt's"),
        ([2, 9], {"dtype": "int8"}, "dtype 'int8', expected one of uint16, uint32"),
        ([2, 9], {"dtype": "uint32", "tokens": 2}, "1 tokens, the receipt states 2"),
        ([2, 9, 9], {"dtype": "uint32"}, "not a multiple of uint32"),
        ([2, 9], {"schema": "other-1"}, "schema 'other-1'"),
        ([2, 9], {"format": "csv"}, "format 'csv', expected bin or parquet"),
        ([2, 9], {"bos_id": None}, "'bos_id' is missing or not of type int"),
        ([2, 9], {"tokens": "2"}, "'tokens' is missing or not of type int"),
    ],
)
def test_broken_token_file_is_refused_in_one_line(
    tmp_path: Path, ids: list[int], fields: dict, message: str
) -> None:
    path = written(tmp_path, ids, **fields)
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        TokenFile(path)


def test_missing_data_parts_are_refused_in_one_line(tmp_path: Path) -> None:
    def refused(message: str, call: Callable[[], object] = lambda: TokenFile(path)) -> None:
        with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
            call()

    refused(r"0 receipts \(\*\.json\)", lambda: TokenFile(tmp_path))
    path = written(tmp_path, [2, 9, 2, 9])
    file = TokenFile(path)
    assert len(file.starts) == 2
    refused("batch 0, 8 tokens a row: out of range", lambda: PackedBatches(file, 0, 8, 0))
    path.with_suffix(".json").write_text("{")
    refused("the receipt is not JSON")
    path.with_suffix(".json").unlink()
    refused("no receipt")
    written(tmp_path, [2, 9]).unlink()
    refused("no such file, though its receipt exists", lambda: TokenFile(tmp_path))


def test_chunks_and_wide_token_ids_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("launch.data.CHUNK", 4)
    assert lengths_file(tmp_path, [3, 10, 4]).starts.tolist() == [0, 3, 13]
    raw = np.array([2, 70_000, 2, 9], np.uint32).tobytes()
    file = TokenFile(written(tmp_path, [0] * 4, raw, dtype="uint32", vocab_size=131_072))
    assert next(PackedBatches(file, 1, 4, 0)).sort().values.tolist() == [[2, 2, 9, 70_000]]


def install_pyarrow(monkeypatch, columns: dict[str, list[np.ndarray]]) -> None:
    """Install stubs for the part of pyarrow that the reader calls: a file whose batches hold flat lists of ids."""

    def column(ids: np.ndarray) -> SimpleNamespace:
        flat = SimpleNamespace(to_numpy=lambda zero_copy_only: ids)
        return SimpleNamespace(column=lambda name: SimpleNamespace(flatten=lambda: flat))

    def opened(path: Path) -> SimpleNamespace:
        if path.read_bytes() == b"broken":
            raise ValueError("magic bytes not found\nin a second line")
        schema = SimpleNamespace(names=list(columns))
        return SimpleNamespace(
            schema_arrow=schema, iter_batches=lambda columns: map(column, every[columns[0]])
        )

    every = columns
    parquet = SimpleNamespace(ParquetFile=opened)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)


def test_parquet_documents_are_read_end_to_end(tmp_path: Path, monkeypatch) -> None:
    path = written(tmp_path, [2, 9, 9, 2, 7], name="t.parquet")
    batches = [np.array([2, 9, 9]), np.array([2, 7])]
    install_pyarrow(monkeypatch, {"tokens": batches})
    assert TokenFile(path).ids.tolist() == [2, 9, 9, 2, 7]
    for columns, message in (
        ({"text": batches}, "no column 'tokens'"),
        ({"tokens": [np.array([2, -1])]}, "ids outside uint16"),
        ({"tokens": [np.array([2, 70_000])]}, "ids outside uint16"),
    ):
        install_pyarrow(monkeypatch, columns)
        with pytest.raises(DataError, match=message):
            TokenFile(path)
    broken = written(tmp_path, [2, 9], b"broken", "b.parquet")
    with pytest.raises(DataError, match=r"^[^\n]*: not parquet \(magic bytes not found\)$"):
        TokenFile(broken)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"^[^\n]*pip install pyarrow$"):
        TokenFile(path)


def pieces_of(rows: Tensor) -> Counter[tuple[int, int]]:
    """Count (id, length) of each document in the rows, without padding; a piece is a BOS and one repeated id."""
    found: Counter[tuple[int, int]] = Counter()
    for row in rows.tolist():
        starts = [i for i, token in enumerate(row) if token == BOS] + [len(row)]
        for start, stop in pairwise(starts):
            if stop - start > 1:
                assert len(set(row[start + 1 : stop])) == 1, "two documents after one BOS"
                found[row[start + 1], stop - start] += 1
    return found


def test_epoch_holds_every_document_once(tmp_path: Path) -> None:
    """Short documents are not cut; one of 25 in rows of 10 becomes 10 + 10 + 7, each piece after its own BOS."""
    lengths = [3, 10, 4, 25, 6, 7, 2, 9]
    batches = PackedBatches(lengths_file(tmp_path, lengths), 1, 10, seed=0)
    batches.WAITING = 1  # no piece waits for another, so that an epoch ends where its rows end
    rows = [next(batches)[0] for _ in range(len(batches.pieces))]
    assert all(row[0] == BOS for row in rows)
    expected = Counter((10 + number, length) for number, length in enumerate(lengths) if length <= 10)
    expected += Counter({(13, 10): 2, (13, 7): 1})
    assert pieces_of(torch.stack(rows)) == expected
    used = sum(n * length for (_, length), n in expected.items())
    assert batches.counts == {"cut": 2, "padding": 10 * len(rows) - used, "rows": len(rows)}


def test_best_fit_packs_tighter_than_first_come(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 60, (400,), generator=generator).tolist()
    padding = {}
    for waiting in (1, 64):
        batches = PackedBatches(lengths_file(tmp_path, lengths), 8, 64, seed=0)
        batches.WAITING = waiting
        rows = torch.cat([next(batches) for _ in range(20)])
        assert pieces_of(rows).total() >= len(rows)
        padding[waiting] = batches.counts["padding"] / rows.numel()
    assert padding[64] < 0.02 < 0.2 < padding[1]


def test_padding_has_no_targets(tmp_path: Path) -> None:
    """BOS as padding: documents of one token, without targets, which nothing attends to."""
    ids = next(PackedBatches(lengths_file(tmp_path, [5, 5, 5]), 1, 8, seed=0))
    assert ids[0].tolist()[5:] == [BOS] * 3
    doc_ids, _ = documents(ids, BOS)
    assert doc_ids[0].tolist() == [1] * 5 + [2, 3, 4]
    assert next_token_targets(ids, doc_ids)[0].tolist() == [*ids[0, 1:5].tolist(), -1, -1, -1, -1]


def test_order_depends_on_seed_and_epoch_only() -> None:
    file = TokenFile(CORPUS)
    a, b, c = (PackedBatches(file, 4, 64, seed) for seed in (0, 0, 1))
    first = [next(a) for _ in range(3)]
    assert all(torch.equal(x, next(b)) for x in first)
    assert not torch.equal(first[0], next(c))
    orders = [tuple(a._shuffled())]
    a.epoch += 1
    orders.append(tuple(a._shuffled()))
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("before", "epoch"), [(5, 0), (70, 1)])
def test_stream_resumes_where_it_was(before: int, epoch: int, tmp_path: Path) -> None:
    """Through JSON, in the middle of the first or a later epoch and across its end; a different packing is rejected."""
    file = lengths_file(tmp_path, [3, 10, 4, 25, 6, 7, 2, 9] * 20)
    stream = PackedBatches(file, 2, 10, seed=3)
    for _ in range(before):
        next(stream)
    assert stream.epoch == epoch
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [next(stream) for _ in range(100)]
    again = PackedBatches(file, 2, 10, seed=3)
    assert not torch.equal(next(again), expected[0])
    again.load_state_dict(state)
    assert all(torch.equal(next(again), ids) for ids in expected)
    assert (again.counts, again.epoch) == (stream.counts, stream.epoch)
    assert again.epoch > epoch
    with pytest.raises(DataError, match="cannot resume: seed was 3, now it is 4"):
        PackedBatches(file, 2, 10, seed=4).load_state_dict(state)
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="cannot resume: sha256 was"):
        PackedBatches(lengths_file(tmp_path / "other", [3, 10]), 2, 10, seed=3).load_state_dict(state)


def test_synthetic_stream_draws_and_resumes() -> None:
    stream, again = (SyntheticBatches(512, 2, 8, seed=3) for _ in range(2))
    first, second = next(stream), next(stream)
    assert not torch.equal(first, second)
    assert (first[:, 0] == BOS).all()
    assert torch.equal(next(again), first)
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert torch.equal(next(again), next(stream))


@planted("X13", "a generator without a receipt")
def test_receipts_describe_the_data() -> None:
    file = TokenFile(CORPUS)
    packed = receipt(PackedBatches(file, 4, 64, 0))
    assert packed["kind"] == "tokens"
    assert packed["sha256"] == hashlib.sha256(file.path.read_bytes()).hexdigest()
    assert packed["packing"] == {"batch": 4, "tokens": 64, "seed": 0}
    assert receipt(SyntheticBatches(512, 4, 64, 0))["kind"] == "synthetic"
    with pytest.raises(DataError, match="generator is not a checked token file: it has no receipt"):
        receipt(torch.randint(512, (4, 64)) for _ in range(3))


def check_corpus(checkout: Path) -> tuple[int, str]:
    command = [sys.executable, "fixtures/make_corpus.py", "--check"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_corpus_decodes_to_its_source(row) -> None:
    """The token file decodes to source.txt, and its writer finds nothing to change."""
    file = TokenFile(CORPUS)
    parts = np.split(np.asarray(file.ids), file.starts[1:])
    source = (CORPUS / "source.txt").read_text()
    texts = [part.split("\n", 1)[1] for part in f"\n{source}".split("\n=== ")[1:]]
    assert [decode(part.tolist()).decode() for part in parts] == texts
    assert parts[0].tolist() == encode(texts[0].encode())
    code, output = check_corpus(ROOT)
    assert code == 0, output
    size = sum(path.stat().st_size for path in CORPUS.iterdir())
    row.bound("launch/corpus/bytes", size, "bytes", at_most=400_000, seen=texts, rule="X13")


def test_corpus_writer_detects_a_stale_file(tmp_path: Path) -> None:
    """One changed byte of the source, in a copy of the writer's input."""
    for name in ("launch", "model", "kernels"):
        (tmp_path / name).symlink_to(ROOT / name)
    copy = tmp_path / CORPUS.relative_to(ROOT)
    shutil.copytree(CORPUS, copy)
    shutil.copy(CORPUS.parent / "make_corpus.py", copy.parent)
    source = copy / "source.txt"
    source.write_text(source.read_text().replace("hybrid", "Hybrid", 1))
    code, output = check_corpus(tmp_path)
    assert code == 1, output
    assert "stale: tokens.bin, tokens.json" in output


@planted("X13", "an empty document among long ones")
def test_every_row_has_a_target(tmp_path: Path) -> None:
    """No other piece fits behind an empty document; its row alone would have the loss NaN (--rows 1)."""
    batches = PackedBatches(lengths_file(tmp_path, [10] * 5 + [1] + [10] * 5), 1, 10, seed=0)
    assert all(bool((next(batches)[0, 1:] != BOS).any()) for _ in range(40))
    with pytest.raises(DataError, match="no document has a target"):
        PackedBatches(lengths_file(tmp_path, [1, 1]), 1, 10, seed=0)

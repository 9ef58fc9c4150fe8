"""Several files are replaced together, through links."""

from __future__ import annotations

from pathlib import Path

from bumpgate.process.file_transaction import ADOPTION, Edit, Operation, replace_all


def test_linked_file_is_replaced_where_it_is(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "tree", tmp_path / "shared" / "cpu.json"
    (root / "baselines").mkdir(parents=True)
    elsewhere.parent.mkdir()
    elsewhere.write_text("old\n")
    (root / "baselines/cpu.json").symlink_to(elsewhere)
    replace_all(root, [Edit("baselines/cpu.json", "old\n", "new\n")], Operation(ADOPTION, "cpu"))
    assert (root / "baselines/cpu.json").is_symlink()
    assert elsewhere.read_text() == "new\n"
    assert [path.name for path in elsewhere.parent.iterdir()] == ["cpu.json"]

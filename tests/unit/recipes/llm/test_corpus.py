"""Reading documents, and the words for what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from planaria.errors import DataError
from planaria.recipes.llm import LlmConfig, corpus

MakeConfig = Callable[..., LlmConfig]


def refusal(config: LlmConfig) -> str:
    with pytest.raises(DataError) as caught:
        list(corpus.read(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_documents_of_each_kind(tmp_path: Path, make_config: MakeConfig) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "four"}\n\n{"text": "five"}\n', encoding="utf-8")
    pq.write_table(pa.table({"text": ["six", None, "seven"]}), tmp_path / "c.parquet")
    (tmp_path / "d.bin").write_bytes(b"\xff")
    data = (str(tmp_path),)
    rows = ["four", "five", "six", "seven"]
    whole = list(corpus.read(make_config(data=data, documents="file")))
    assert whole == ["one\ntwo\n\n\nthree\n", *rows]
    assert list(corpus.read(make_config(data=data, documents="paragraph"))) == [
        "one\ntwo\n",
        "three\n",
        *rows,
    ]
    assert list(corpus.read(make_config(data=data, documents="line"))) == [
        "one",
        "two",
        "three",
        *rows,
    ]
    limited = make_config(data=data, documents="line", max_bytes=len("onetwothree") + 2)
    assert list(corpus.read(limited)) == ["one", "two", "three"]


def test_globs_and_repeats(tmp_path: Path, make_config: MakeConfig) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    config = make_config(data=(str(tmp_path / "*.txt"), str(tmp_path / "a.txt")), documents="file")
    assert list(corpus.read(config)) == ["a.txt", "b.txt"]


def test_standard_library_is_there(make_config: MakeConfig) -> None:
    config = make_config(data=("stdlib",), documents="file", max_bytes=300_000)
    texts = list(corpus.read(config))
    assert len(texts) > 5
    assert all("site-packages" not in source.name for source in corpus.sources(config))


def test_missing_things(tmp_path: Path, make_config: MakeConfig) -> None:
    gone = tmp_path / "gone.txt"
    assert refusal(make_config(data=(str(gone),))) == (
        f"data: {gone} does not exist; give a file, a folder, a glob, datasets:NAME or stdlib"
    )
    pattern = tmp_path / "*.txt"
    assert refusal(make_config(data=(str(pattern),))) == (
        f"data: no file matches {pattern}; check the pattern (and quote it)"
    )
    assert refusal(make_config(data=(str(tmp_path),))) == (
        f"data: folder {tmp_path} holds no .txt, .md, .rst, .py, .jsonl or .parquet file; "
        "give a folder of text, or the files themselves"
    )
    assert refusal(make_config(data=("datasets:",))) == (
        "data: 'datasets:' names no data set; write datasets:NAME"
    )


def test_not_utf8(tmp_path: Path, make_config: MakeConfig) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("caf\u00e9".encode("latin-1"))
    assert refusal(make_config(data=(str(file),))) == (
        f"data: {file} is not UTF-8 at byte 3; convert it (iconv -f latin1 -t utf-8) "
        "or leave it out"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ', "not JSON (Expecting value); mend or delete the line"),
        (b"[1]", "a JSON list, not an object; each line must be one object"),
        (
            b'{"body": "x", "id": 1}',
            "no field 'text' (fields: body, id); name it with --text-field",
        ),
        (b'{"text": 3}', "field 'text' is int, not text; name it with --text-field"),
        (b'{"text": "\xff"}', "not UTF-8; mend or delete the line"),
    ],
)
def test_bad_json_line(tmp_path: Path, make_config: MakeConfig, line: bytes, reason: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    assert refusal(make_config(data=(str(file),))) == f"data: {file}, line 2: {reason}"


def test_bad_tables(tmp_path: Path, make_config: MakeConfig) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), file)
    assert refusal(make_config(data=(str(file),))) == (
        f"data: {file}: no column 'text' (columns: body, id); name it with --text-field"
    )
    assert refusal(make_config(data=(str(file),), text_field="id")) == (
        f"data: {file}: column 'id' is int64, not text; name it with --text-field"
    )
    assert list(corpus.read(make_config(data=(str(file),), text_field="body"))) == ["x"]
    file.write_bytes(b"PAR1 and nothing else")
    message = refusal(make_config(data=(str(file),)))
    assert message.startswith(f"data: cannot read {file}: ")
    assert message.endswith("; check the file or leave it out")


def test_hub_without_its_package(make_config: MakeConfig) -> None:
    pytest.importorskip("transformers")
    try:
        import datasets  # noqa: F401  # pyright: ignore
    except ModuleNotFoundError:
        assert refusal(make_config(data=("datasets:some/name",))) == (
            "data: datasets:some/name needs the package datasets; run pip install datasets, "
            "or give files"
        )
    else:
        pytest.skip("the package datasets is installed")


def test_fingerprint_follows_contents_and_options(tmp_path: Path, make_config: MakeConfig) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"text": "a"}) + "\n", encoding="utf-8")
    config = make_config(data=(str(file),))
    first = corpus.fingerprint(config)
    assert corpus.fingerprint(config) == first
    assert corpus.fingerprint(make_config(data=(str(file),), documents="line")) != first
    file.write_text(json.dumps({"text": "ab"}) + "\n", encoding="utf-8")
    assert corpus.fingerprint(config) != first


def test_held_out_is_decided_by_the_text(make_config: MakeConfig) -> None:
    texts = [f"document {i}" for i in range(4000)]
    chosen = {text for text in texts if corpus.held_out(text, 0.05)}
    assert chosen == {text for text in reversed(texts) if corpus.held_out(text, 0.05)}
    # 4,000 draws at 5 %: 200 expected, standard deviation 13.8; five of them.
    assert 131 < len(chosen) < 269
    assert chosen <= {text for text in texts if corpus.held_out(text, 0.1)}

"""Packing, the order of samples and the cache that all workers share."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from planaria.errors import DataError
from planaria.recipes.llm import LlmConfig, corpus, data, prepare

MakeConfig = Callable[..., LlmConfig]


def order(**changes: int) -> data.Order:
    settings = {"samples": 1000, "seed": 7, "world": 4, "batch": 3, "accumulate": 2}
    return data.Order(**(settings | changes))


def step_ids(made: data.Order, step: int) -> list[int]:
    return [
        int(i)
        for micro in range(made.accumulate)
        for shard in range(made.world)
        for i in made.ids(step, shard=shard, micro=micro)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_permutation_is_one(size: int) -> None:
    positions = np.arange(size, dtype=np.uint64)
    image = data.permute(positions, size=size, key=(3, 1))
    assert sorted(image.tolist()) == list(range(size))
    assert positions.tolist() == list(range(size))
    for i in range(0, size, 7):
        one = data.permute(positions[i : i + 1], size=size, key=(3, 1))
        assert one.tolist() == [image[i]]


def test_permutation_mixes_and_depends_on_its_key() -> None:
    positions = np.arange(10_000, dtype=np.uint64)
    images = [
        data.permute(positions, size=10_000, key=key).astype(np.int64)
        for key in ((0, 0), (0, 1), (1, 0))
    ]
    for image in images:
        # Correlations of random orders have standard deviation 1 / sqrt(10,000) = .01.
        assert abs(np.corrcoef(positions, image)[0, 1]) < 0.05
        assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(images[a], images[b])[0, 1]) < 0.05


def test_order_is_pure_and_known() -> None:
    made = order()
    assert made.ids(5, shard=2, micro=1).tolist() == order().ids(5, shard=2, micro=1).tolist()
    # A change of the permutation would break the resumption of runs: this is its golden value.
    assert made.ids(1, shard=0, micro=0).tolist() == [157, 571, 568]


def test_shards_never_overlap_and_an_epoch_repeats_nothing() -> None:
    made = order()
    steps = made.samples // made.per_step
    seen = [i for step in range(1, steps + 1) for i in step_ids(made, step)]
    assert len(seen) == steps * made.per_step == len(set(seen))
    assert max(seen) < made.samples
    following = step_ids(made, steps + 1)
    assert made.samples <= min(following)
    assert max(following) < 2 * made.samples
    assert {i % made.samples for i in following} != set(step_ids(made, 1))


def test_the_samples_of_a_step_do_not_depend_on_who_takes_them() -> None:
    for step in (1, 17, 60):
        expected = sorted(step_ids(order(), step))
        for world, batch, accumulate in ((1, 24, 1), (2, 3, 4), (8, 1, 3)):
            other = order(world=world, batch=batch, accumulate=accumulate)
            assert sorted(step_ids(other, step)) == expected


def test_too_few_samples_for_a_step() -> None:
    with pytest.raises(DataError) as caught:
        order(samples=23)
    assert str(caught.value) == (
        "data: the corpus makes 23 samples, but a step of 4 workers x 2 micro-batches x 3 takes "
        "24; give more text, or lower --batch, --accumulate or --sequence"
    )


def test_packed_text_is_the_documents_in_order(make_config: MakeConfig) -> None:
    config = make_config()
    packed = prepare(config)
    tokenizer, end = packed.vocabulary.load(), packed.vocabulary.end
    texts = list(corpus.read(config))
    for tokens, out in ((packed.train, False), (packed.held_out, True)):
        expected = [t for t in texts if corpus.held_out(t, config.held_out) == out]
        cuts = np.flatnonzero(tokens == end)
        assert len(cuts) == len(expected)
        assert cuts[-1] == len(tokens) - 1
        documents = np.split(tokens, cuts + 1)[:-1]
        assert [tokenizer.decode(d[:-1].tolist()) for d in documents] == expected
    assert sum(packed.documents) == len(texts)
    assert isinstance(packed.train, np.memmap)


def test_a_sample_is_one_window_and_no_label_leaves_it(make_config: MakeConfig) -> None:
    packed = prepare(make_config(sequence=16))
    assert packed.samples == len(packed.train) // 16
    ids = np.array([0, 3, packed.samples + 3, packed.samples - 1])
    batch = packed.batch(ids)
    assert batch.shape == (4, 16)
    assert batch.dtype == np.int64
    assert (batch[1] == packed.train[48:64]).all()
    assert (batch[2] == batch[1]).all()
    last = (packed.samples - 1) * 16
    assert (batch[3] == packed.train[last : last + 16]).all()
    held_out = packed.held_out_batch(np.array([1]))
    assert (held_out[0] == packed.held_out[16:32]).all()


def test_the_cache_is_used_and_follows_its_source(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"line {i} of many\n" for i in range(500)), encoding="utf-8")
    config = make_config(data=(str(file),), documents="line", cache=tmp_path / "cache")
    first = prepare(config)
    with monkeypatch.context() as patched:
        patched.setattr(data, "_build", None)
        assert (prepare(config).train == first.train).all()
    file.write_text("".join(f"line {i} of more\n" for i in range(600)), encoding="utf-8")
    assert sum(prepare(config).documents) == 600
    folders = [p.parent for p in tmp_path.glob("cache/corpus-*/train.npy")]
    assert len(folders) == 2
    folder = max(folders, key=lambda p: p.stat().st_mtime_ns)
    (folder / "corpus.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        prepare(config)
    message = str(caught.value)
    assert message.startswith(f"cache: {folder} is damaged (")
    assert message.endswith("); delete it, it will be made anew")


def _prepare_in_child(config: LlmConfig, answers: multiprocessing.SimpleQueue[object]) -> None:
    built: list[int] = []
    original = data._build

    def counting(*args: object) -> None:
        built.append(1)
        original(*args)  # pyright: ignore

    data._build = counting
    packed = prepare(config)
    answers.put((len(built), packed.samples, packed.vocabulary.digest))


def test_of_many_processes_one_builds(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(cache=tmp_path / "cache")
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    children = [context.Process(target=_prepare_in_child, args=(config, answers)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=60)
        assert child.exitcode == 0
    said = [answers.get() for _ in children]
    assert sum(built for built, _, _ in said) == 1
    assert len({(samples, digest) for _, samples, digest in said}) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_failure_leaves_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    good, bad = tmp_path / "a.txt", tmp_path / "b.jsonl"
    good.write_text("some text\n" * 50, encoding="utf-8")
    trained = prepare(make_config()).vocabulary
    bad.write_text("no JSON\n", encoding="utf-8")
    config = make_config(
        data=(str(good), str(bad)), tokenizer=str(trained.folder), cache=tmp_path / "cache"
    )
    with pytest.raises(DataError) as caught:
        prepare(config)
    assert str(caught.value) == (
        f"data: {bad}, line 1: not JSON (Expecting value); mend or delete the line"
    )
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_too_little_text(make_config: MakeConfig, tmp_path: Path) -> None:
    trained = prepare(make_config()).vocabulary

    def refusal(text: str, **changes: object) -> str:
        file = tmp_path / "small.txt"
        file.write_text(text, encoding="utf-8")
        config = make_config(data=(str(file),), tokenizer=str(trained.folder), **changes)
        with pytest.raises(DataError) as caught:
            prepare(config)
        return str(caught.value)

    assert refusal(" \n") == f"data: {tmp_path / 'small.txt'} holds no text; give files with text"
    text = "one document\n" * 200
    assert not corpus.held_out(text, 0.05)
    assert refusal(text, documents="file") == (
        "data: 0 tokens of 0 held-out documents (of 1) make no sample of 32; give more documents, "
        "raise --held-out, lower --sequence, or cut files with --documents paragraph or line"
    )
    lines = "".join(f"line {i} of a small file\n" for i in range(40))
    packed = make_config(
        data=(str(tmp_path / "small.txt"),),
        tokenizer=str(trained.folder),
        documents="line",
        held_out=0.5,
        sequence=8,
        batch=32,
    )
    (tmp_path / "small.txt").write_text(lines, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        prepare(packed, world=4)
    assert "but a step of 4 workers x 1 micro-batches x 32 takes 128;" in str(caught.value)


def test_cache_that_cannot_be_written(make_config: MakeConfig, tmp_path: Path) -> None:
    trained = prepare(make_config()).vocabulary
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        prepare(make_config(tokenizer=str(trained.folder), cache=tmp_path / "file"))
    message = str(caught.value)
    assert message.startswith(f"cache: cannot write {tmp_path / 'file'}/corpus-")
    assert message.endswith(": File exists; free space or set cache")


def test_progress_is_said_when_it_takes_long(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(data, "_QUIET", 0.0)
    with caplog.at_level(logging.INFO, logger=data.__name__):
        prepare(make_config(cache=tmp_path / "cache"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) > 1
    assert lines[0].startswith("tokenising: ")
    assert lines[0].endswith(" MB/s")
    assert " documents, " in lines[0]


def test_one_file_is_cut_so_that_a_part_is_held_out(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "my.txt"
    file.write_text("".join(f"Paragraph {i} of a text.\n\n" for i in range(900)), encoding="utf-8")
    config = make_config(data=(str(file),), documents="auto", cache=tmp_path / "cache")
    with caplog.at_level(logging.INFO, logger=corpus.__name__):
        packed = prepare(config)
    assert packed.held_out_samples > 0
    assert sum(packed.documents) == 900
    said = [r.getMessage() for r in caplog.records if r.name == corpus.__name__]
    assert said == [
        "data: too few files to hold some out, so they are cut by paragraph and 5 % is held "
        "out; --documents and --held-out say otherwise"
    ]


def test_many_files_stay_whole(make_config: MakeConfig) -> None:
    config = make_config(documents="auto", held_out=0.5)
    assert corpus.settle(config).documents == "file"

"""The promises of `ChunkStream`: order, shares, splits, resume, and the end of the data."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.data import sources as sources_module
from steelyard.data.config import DataConfig, SourceConfig
from steelyard.data.packing import Chunk
from steelyard.data.stream import ChunkStream, merge_states
from steelyard.errors import DataError, UsageError

EOS = 256


def config_of(*paths: Path, **settings: Any) -> DataConfig:
    defaults: dict[str, Any] = {"chunk_tokens": 64, "batch_chunks": 4, "epochs": 1}
    return DataConfig(sources=tuple(SourceConfig(path=str(p)) for p in paths), **{**defaults, **settings})


def open_ranks(config: DataConfig, ranks: int, **settings: Any) -> list[ChunkStream]:
    return [ChunkStream(config, rank=r, ranks=ranks, **settings) for r in range(ranks)]


def step(streams: Sequence[ChunkStream]) -> list[Chunk]:
    """One global step in order of lanes."""
    return sorted((c for s in streams for c in s.next_chunks()), key=lambda c: c.lane)


def run_steps(streams: Sequence[ChunkStream], steps: int) -> list[list[Chunk]]:
    return [step(streams) for _ in range(steps)]


def to_the_end(streams: Sequence[ChunkStream], limit: int = 2000) -> list[list[Chunk]]:
    steps = []
    while not all(s.exhausted for s in streams):
        steps.append(step(streams))
        assert len(steps) < limit
    return steps


def values(chunks: Sequence[Chunk]) -> list[tuple[Any, ...]]:
    """Everything in the chunks, comparable with ==."""
    columns = ("tokens", "labels", "positions", "doc_lengths", "doc_source", "doc_start", "doc_id")
    return [(c.lane, *(getattr(c, name).tolist() for name in columns)) for c in chunks]


def documents(steps: Sequence[Sequence[Chunk]]) -> list[str]:
    """The texts, put together again from their parts (per lane, in order)."""
    texts, parts = [], dict[int, list[int]]()
    for chunk in (c for chunks in steps for c in chunks):
        offset = 0
        for length, start in zip(chunk.doc_lengths.tolist(), chunk.doc_start.tolist(), strict=True):
            held = parts.setdefault(chunk.lane, [])
            assert start == len(held), "a part does not begin where the one before ended"
            held.extend(chunk.tokens[offset : offset + length].tolist())
            offset += length
            if held[-1] == EOS:
                texts.append(bytes(held[:-1]).decode())
                held.clear()
    assert not any(parts.values())
    return texts


# --- order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents_kept", ["cut", "whole"])
def test_an_epoch_holds_every_document_once(any_source: Path, texts: list[str], documents_kept: str) -> None:
    steps = to_the_end(open_ranks(config_of(any_source, documents=documents_kept), 2))
    assert sorted(documents(steps)) == sorted(texts)
    steps = to_the_end(open_ranks(config_of(any_source, documents=documents_kept, epochs=3), 1))
    assert Counter(documents(steps)) == Counter(dict.fromkeys(texts, 3))


@pytest.mark.parametrize("deal", ["file", "block", "document"])
def test_order_does_not_depend_on_the_number_of_ranks(
    any_source: Path, deal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if deal != "document":  # small data is dealt by document; a lower threshold shows the other ways
        monkeypatch.setattr(sources_module, "UNITS_PER_LANE", 0)
    if deal == "block":
        monkeypatch.setattr(sources_module.Source, "_choose_deal", lambda self: "block")
    config = config_of(any_source, epochs=None)
    one = [values(s) for s in run_steps(open_ranks(config, 1), 40)]
    for ranks in (2, 3, 4):
        assert [values(s) for s in run_steps(open_ranks(config, ranks), 40)] == one


def test_a_rank_reads_only_its_own_lanes(write: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For files that are documents, the ranks' readings are disjoint and cover everything."""
    path = write("text", texts)
    read: list[set[str]] = []
    original = sources_module.Source.locate

    def recording(self: Any, *args: Any) -> Any:
        found = original(self, *args)
        if isinstance(found, sources_module.Record):
            read[-1].add(found.file.name)
        return found

    monkeypatch.setattr(sources_module.Source, "locate", recording)
    for rank in range(4):
        read.append(set())
        to_the_end([ChunkStream(config_of(path), rank=rank, ranks=4)])
    assert sum(len(r) for r in read) == len(set.union(*read)) == len(texts)


def test_seed_and_epoch_decide_the_order(any_source: Path) -> None:
    def order(**settings: Any) -> list[int]:
        steps = to_the_end(open_ranks(config_of(any_source, **{"batch_chunks": 1, **settings}), 1))
        return [d for s in steps for c in s for d, start in zip(c.doc_id, c.doc_start, strict=True) if start == 0]

    first = order(seed=1)
    assert order(seed=1) == first
    assert order(seed=2) != first and sorted(order(seed=2)) == sorted(first)
    two = order(seed=1, epochs=2)
    assert two[: len(first)] == first
    assert two[len(first) :] != first and sorted(two[len(first) :]) == sorted(first)


def test_without_shuffle_the_order_of_names_and_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{i:03d}"}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:20]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[20:]))
    steps = to_the_end(open_ranks(config_of(tmp_path, shuffle=False, batch_chunks=1), 1))
    assert documents(steps) == [f"{i:03d}" for i in range(50)]


def test_known_order(tmp_path: Path) -> None:
    """Written down once: a change of the data order breaks the resume of every run that was begun before it."""
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(str(i))
    steps = to_the_end(open_ranks(config_of(tmp_path, batch_chunks=2, chunk_tokens=4, seed=3), 1))
    assert [[c.tokens.tolist() for c in s] for s in steps] == [
        [[51, 256, 50, 256], [48, 256, 53, 256]],
        [[49, 256], [52, 256]],
    ]


def test_fewer_documents_than_lanes_serve_all_lanes_in_turn(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(str(i) * 5)
    for shuffle in (True, False):
        stream = ChunkStream(config_of(tmp_path, batch_chunks=6, chunk_tokens=10, epochs=None, shuffle=shuffle))
        assert all(len(c) == 10 for chunks in run_steps([stream], 10) for c in chunks)


# --- packing ----------------------------------------------------------------------------------------------------


def test_chunks_are_full_and_labels_shifted(any_source: Path) -> None:
    for chunks in run_steps(open_ranks(config_of(any_source, epochs=None), 2), 20):
        for chunk in chunks:
            assert len(chunk) == 64 == chunk.doc_lengths.sum()
            offset = 0
            for length in chunk.doc_lengths.tolist():
                tokens = chunk.tokens[offset : offset + length].tolist()
                assert chunk.labels[offset : offset + length].tolist() == [*tokens[1:], -100]
                assert chunk.positions[offset : offset + length].tolist() == list(range(length))
                assert EOS not in tokens[:-1]
                offset += length


def test_whole_documents_are_cut_only_if_longer_than_a_chunk(any_source: Path, texts: list[str]) -> None:
    steps = to_the_end(open_ranks(config_of(any_source, documents="whole"), 1))
    long_documents = {len(t) + 1 for t in texts if len(t) + 1 > 64}
    assert long_documents, "the test data must hold some"
    begun = Counter[int]()
    short_chunks = 0
    for chunks in steps:
        for chunk in chunks:
            short_chunks += 0 < len(chunk) < 64
            for length, doc, start in zip(chunk.doc_lengths, chunk.doc_id, chunk.doc_start, strict=True):
                begun[int(doc)] += int(length)
                if start == 0 and length == 64:
                    assert chunk.doc_lengths[0] == 64, "a long document begins a chunk"
                elif start == 0:
                    assert length <= 64
    parts = Counter(int(d) for s in steps for c in s for d in c.doc_id)
    assert all((parts[d] > 1) == (tokens > 64) for d, tokens in begun.items())
    assert all(parts[d] == -(-tokens // 64) for d, tokens in begun.items())
    assert short_chunks


def test_refused_oversize(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.txt").write_text("short")
    config = config_of(tmp_path, documents="whole", oversize="refuse", batch_chunks=1)
    with pytest.raises(DataError, match=r"a\.txt: 101 tokens, more than a chunk of 64"):
        run_steps([ChunkStream(config)], 3)
    stream = ChunkStream(replace(config, on_error="skip"))
    assert documents(to_the_end([stream])) == ["short"]
    assert stream.skipped.counts == {"oversize": 1}


def test_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    config = config_of(tmp_path, batch_chunks=1, append_eos=False)
    assert ChunkStream(config).next_chunks()[0].tokens.tolist() == [97, 98]
    with pytest.raises(UsageError, match=r"declares no begin-of-document token"):
        ChunkStream(replace(config, prepend_bos=True))

    class WithBos:
        name, vocab_size, eos_id, bos_id, fingerprint = "t", 9, None, 7, "t"

        def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.array([1, 2])

        def decode(self, tokens: Any) -> str:
            return ""

    stream = ChunkStream(replace(config, prepend_bos=True), tokenizer=WithBos())
    assert stream.next_chunks()[0].tokens.tolist() == [7, 1, 2]
    with pytest.raises(UsageError, match=r"set data\.eos_token, or data\.append_eos = false"):
        ChunkStream(replace(config, append_eos=True), tokenizer=WithBos())


# --- mixes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.7, 0.2, 0.1)])
def test_shares_are_exact_to_a_document(tmp_path: Path, weights: tuple[float, ...]) -> None:
    random = np.random.default_rng(1)
    longest = np.zeros(len(weights))
    for s in range(len(weights)):
        (tmp_path / str(s)).mkdir()
        for i in range(30):
            length = int(random.integers(1, 200 * (s + 1)))
            longest[s] = max(longest[s], length + 1)
            (tmp_path / str(s) / f"{i}.txt").write_text("x" * length)
    config = DataConfig(
        sources=tuple(SourceConfig(path=str(tmp_path / str(s)), weight=w) for s, w in enumerate(weights)),
        chunk_tokens=97, batch_chunks=2,
    )  # fmt: skip
    stream = ChunkStream(config)
    for lane in range(2):
        stream.reset()
        drawn = np.zeros(len(weights))
        for chunks in run_steps([stream], 150):
            np.add.at(drawn, chunks[lane].doc_source, chunks[lane].doc_lengths)
            # No source is ahead of another, in proportion, by more than one of its own documents.
            progress = drawn / weights
            assert np.all(progress - progress.min() <= longest / weights)
        assert drawn / drawn.sum() == pytest.approx(np.array(weights) / sum(weights), abs=0.05)


def test_a_source_that_ends_leaves_the_mix(write: Any, texts: list[str]) -> None:
    long, short = write("jsonl", texts), write("text", ["a", "b", "c"])
    steps = to_the_end(open_ranks(config_of(long, short), 2))
    assert sorted(documents(steps)) == sorted([*texts, "a", "b", "c"])


# --- evaluation split -------------------------------------------------------------------------------------------


def test_evaluation_documents_never_appear_in_training(any_source: Path, texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    for i, text in enumerate(texts):  # the same documents in another source, under other names
        (tmp_path / "copies" / f"copy{i}.txt").write_text(text)
    config = config_of(any_source, tmp_path / "copies", eval_fraction=0.2)
    train = documents(to_the_end(open_ranks(config, 2)))
    held = documents(to_the_end(open_ranks(config, 2, split="eval")))
    assert not set(train) & set(held)
    assert Counter(train) + Counter(held) == Counter(dict.fromkeys(texts, 2))
    assert 0.1 < len(held) / (2 * len(texts)) < 0.3


def test_split_mistakes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only one")
    with pytest.raises(UsageError, match="eval_fraction=0"):
        ChunkStream(config_of(tmp_path), split="eval")
    stream = ChunkStream(config_of(tmp_path, eval_fraction=1e-9, epochs=None), split="eval")
    with pytest.raises(DataError, match=r"no document for split 'eval' \(eval_fraction=1e-09\)"):
        stream.next_chunks()


# --- resume -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed_config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Two sources of different formats, with empty and broken records between."""
    root = tmp_path_factory.mktemp("mixed")
    random = np.random.default_rng(3)
    (root / "files").mkdir()
    for i in range(25):
        (root / "files" / f"{i:02d}.txt").write_text("f" * int(random.integers(0, 150)))
    (root / "files" / "broken.txt").write_bytes(b"\xff")
    lines = [json.dumps({"text": f"{i} " + "j" * int(random.integers(0, 90))}) for i in range(40)]
    lines[7] = "not json"
    (root / "lines.jsonl").write_text("\n".join(lines))
    return DataConfig(
        sources=(SourceConfig(path=str(root / "files"), weight=2.0), SourceConfig(path=str(root / "lines.jsonl"))),
        chunk_tokens=48, batch_chunks=6, on_error="skip", seed=5,
    )  # fmt: skip


@settings(max_examples=40)
@given(
    stop=st.integers(0, 40), before=st.integers(1, 6), after=st.integers(1, 6),
    kept=st.sampled_from(["cut", "whole"]), epochs=st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_resume_is_exact_on_any_number_of_ranks(
    mixed_config: DataConfig, stop: int, before: int, after: int, kept: Any, epochs: int | None
) -> None:
    config = replace(mixed_config, documents=kept, epochs=epochs)
    whole = open_ranks(config, 1)
    expected = [values(s) for s in run_steps(whole, stop + 8)]
    first = open_ranks(config, before)
    assert [values(s) for s in run_steps(first, stop)] == expected[:stop]
    state = json.loads(json.dumps(merge_states(s.state_dict() for s in first)))
    second = open_ranks(config, after)
    for stream in second:
        stream.load_state_dict(state)
    assert [values(s) for s in run_steps(second, 8)] == expected[stop:]
    # The merged state is that of a run that was never stopped, counts of what was skipped included.
    assert merge_states(s.state_dict() for s in second) == whole[0].state_dict()


def test_state_is_not_moved_by_looking_ahead(mixed_config: DataConfig) -> None:
    config = replace(mixed_config, epochs=1)
    with_looks, without = ChunkStream(config), ChunkStream(config)
    for _ in range(30):
        assert not with_looks.exhausted or without.exhausted
        assert values(with_looks.next_chunks()) == values(without.next_chunks())
        resumed = ChunkStream(config)
        resumed.load_state_dict(with_looks.state_dict())
        again = ChunkStream(config)
        again.load_state_dict(without.state_dict())
        assert values(resumed.next_chunks()) == values(again.next_chunks())


def test_reset(mixed_config: DataConfig) -> None:
    stream = ChunkStream(mixed_config)
    first = [values(stream.next_chunks()) for _ in range(5)]
    stream.reset()
    assert [values(stream.next_chunks()) for _ in range(5)] == first


def test_longer_chunks_and_more_epochs_may_follow(mixed_config: DataConfig) -> None:
    """The state counts documents and tokens, so the length of chunks may change between phases of a training."""
    short = ChunkStream(replace(mixed_config, epochs=1))
    begun = run_steps([short], 4)
    longer = ChunkStream(replace(mixed_config, epochs=1, chunk_tokens=160))
    longer.load_state_dict(short.state_dict())
    found = Counter(documents([*begun, *to_the_end([longer])]))
    assert found == Counter(documents(to_the_end([ChunkStream(replace(mixed_config, epochs=1))])))


def test_a_state_of_other_data_is_refused(mixed_config: DataConfig, tmp_path: Path) -> None:
    state = ChunkStream(mixed_config).state_dict()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 6}, "seed was 5 and is 6"),
        ({"batch_chunks": 7}, "batch_chunks was 6 and is 7"),
        ({"eval_fraction": 0.5}, "eval_fraction"),
        ({"append_eos": False}, "special_tokens"),
    ]
    for change, name in changes:
        with pytest.raises(UsageError, match=name):
            ChunkStream(replace(mixed_config, **change)).load_state_dict(state)
    with pytest.raises(UsageError, match="no lanes"):
        ChunkStream(mixed_config).load_state_dict(ChunkStream(mixed_config, rank=0, ranks=2).state_dict())
    with pytest.raises(UsageError, match="version 99"):
        ChunkStream(mixed_config).load_state_dict({**state, "version": 99})
    (tmp_path / "a.txt").write_text("one")
    before = ChunkStream(config_of(tmp_path)).state_dict()
    (tmp_path / "b.txt").write_text("two")
    with pytest.raises(UsageError, match=r"files was \['1 files .* and is \['2 files"):
        ChunkStream(config_of(tmp_path)).load_state_dict(before)


def test_merging_states_of_different_streams(mixed_config: DataConfig) -> None:
    a, b = ChunkStream(mixed_config, rank=0, ranks=2), ChunkStream(replace(mixed_config, seed=9), rank=1, ranks=2)
    with pytest.raises(UsageError, match="different data or settings"):
        merge_states([a.state_dict(), b.state_dict()])
    early = a.state_dict()
    a.next_chunks()
    with pytest.raises(UsageError, match="lane 0 stands in two states"):
        merge_states([early, a.state_dict()])
    with pytest.raises(UsageError, match="nothing to merge"):
        merge_states([])


# --- the end, ranks, threads ------------------------------------------------------------------------------------


def test_dry_lanes_give_empty_chunks_until_all_are_dry(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 199)
    (tmp_path / "short.txt").write_text("y" * 9)
    stream = ChunkStream(config_of(tmp_path, batch_chunks=2, chunk_tokens=50, shuffle=False))
    lengths = []
    while not stream.exhausted:
        lengths.append([len(c) for c in stream.next_chunks()])
    assert lengths == [[50, 10], [50, 0], [50, 0], [50, 0]]
    assert [len(c) for c in stream.next_chunks()] == [0, 0] and stream.exhausted


def test_endless_stream_is_never_exhausted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    stream = ChunkStream(config_of(tmp_path, epochs=None))
    assert all(len(c) == 64 for c in stream.next_chunks()) and not stream.exhausted


def test_ranks(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert [s.lanes for s in open_ranks(config_of(tmp_path), 3)] == [(0, 3), (1,), (2,)]
    with pytest.raises(UsageError, match=r"5 ranks for batch_chunks=4.*raise batch_chunks to 5"):
        ChunkStream(config_of(tmp_path), rank=0, ranks=5)
    with pytest.raises(UsageError, match="rank 2 of 2"):
        ChunkStream(config_of(tmp_path), rank=2, ranks=2)


def test_from_another_thread(mixed_config: DataConfig) -> None:
    expected = [values(s) for s in run_steps([ChunkStream(mixed_config)], 24)]
    stream = ChunkStream(mixed_config)
    found: list[list[tuple[Any, ...]]] = []

    def read() -> None:
        for _ in range(6):
            with lock:
                found.append(values(stream.next_chunks()))
            stream.state_dict()

    lock = threading.Lock()
    threads = [threading.Thread(target=read) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"sources": ()}, "no sources"), ({"chunk_tokens": 0}, "chunk_tokens=0"), ({"batch_chunks": 0}, "batch_chunks=0"),
     ({"epochs": 0}, "epochs=0"), ({"eval_fraction": 1.0}, "eval_fraction=1.0"), ({"documents": "half"}, "'half'"),
     ({"on_error": "ignore"}, "expected one of stop, skip")],
)  # fmt: skip
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DataConfig(**{"sources": (SourceConfig(path="x"),), **settings})

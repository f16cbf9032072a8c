"""The loader's side: which samples and which tokens of them a rank reads."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from tests.cases import held
from tests.strategies import examples, ulysses_meshes
from wallfacer_dt import SequenceDataset, SequenceSampler, TokenOrder, context_mesh
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.fake import fake_world

Ranks = Callable[[int], RankPool]
STREAM = np.arange(101)


class Recording:
    """A stream that notes which tokens are read."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return len(STREAM)

    def __getitem__(self, rows: slice) -> np.ndarray:
        self.read |= set(range(rows.start, rows.stop))
        return STREAM[rows]


def test_one_process_reads_whole_windows() -> None:
    dataset = SequenceDataset(STREAM, 20)
    assert len(dataset) == 5
    inputs, labels = dataset[-1]
    assert inputs.equal(torch.arange(80, 100))
    assert labels.equal(torch.arange(81, 101))
    with pytest.raises(IndexError, match="sample 5 of 5"):
        dataset[5]


@pytest.mark.parametrize(
    "stream",
    [
        bytes(range(9)),
        bytearray(range(9)),
        memoryview(bytes(range(9))),
        memoryview(np.arange(9, dtype=np.uint16)),
        torch.arange(9),
        np.arange(9, dtype=np.uint16),
        list(range(9)),
    ],
)
def test_any_stream(stream: object) -> None:
    inputs, labels = SequenceDataset(stream, 4)[1]
    assert inputs.tolist() == [4, 5, 6, 7]
    assert labels.tolist() == [5, 6, 7, 8]
    assert inputs.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("length", [0, 7, 100])
def test_windows_do_not_overlap_and_have_their_last_label(length: int) -> None:
    stream = list(range(length + 1))
    if length == 0:
        with pytest.raises(ValueError, match="needs 5 tokens, the stream has 1"):
            SequenceDataset(stream, 4)
        return
    dataset = SequenceDataset(stream, 4)
    assert torch.cat([dataset[i][0] for i in range(len(dataset))]).tolist() == stream[: length // 4 * 4]


@examples(60)
@given(
    length=st.integers(1, 50),
    size=st.integers(1, 12),
    order=st.sampled_from(["contiguous", "head_tail"]),
    data=st.data(),
)
def test_any_length_on_any_mesh(length: int, size: int, order: str, data: st.DataObject) -> None:
    """Of a short window a rank may read nothing."""
    ring, team, ulysses = data.draw(st.sampled_from(ulysses_meshes(size)))
    index = data.draw(st.integers(0, size - 1))
    recording = Recording()
    with fake_world(size, index):
        mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
        dataset = SequenceDataset(recording, length, TokenOrder(order, mesh))
    assert len(dataset) == 100 // length
    sample = data.draw(st.integers(0, len(dataset) - 1))
    inputs, labels = dataset[sample]
    expected = [sample * length + p for p in held(index, (ulysses, ring, team), order, length)]
    assert inputs.tolist() == expected
    assert labels.tolist() == [p + 1 for p in expected]
    assert inputs.dtype == labels.dtype == torch.int64
    assert recording.read == {q for p in expected for q in (p, p + 1)}


def test_a_stream_has_no_documents() -> None:
    message = "order='document_head_tail' needs documents, which a stream does not have"
    with fake_world(4), pytest.raises(ValueError, match=message):
        SequenceDataset(STREAM, 8, TokenOrder("document_head_tail", context_mesh("cpu", 4)))


def read_on_a_rank(order: str) -> dict:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp_ring", "cp_team"))
    context = mesh["cp_ring", "cp_team"]
    recording = Recording()
    dataset = SequenceDataset(recording, 8, TokenOrder(order, context))
    sampler = SequenceSampler(dataset, context, data_parallel=mesh["dp"], seed=3)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    batches = [(x.tolist(), y.tolist()) for x, y in loader]
    return {
        "dp": mesh["dp"].get_local_rank(),
        "indices": list(sampler),
        "batches": batches,
        "read": sorted(recording.read),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
def test_groups_read_different_samples_and_ranks_their_own_chunks(ranks: Ranks, order: str) -> None:
    answers = ranks(8).run(read_on_a_rank, order)
    chunks = [{i, 7 - i} if order == "head_tail" else {2 * i, 2 * i + 1} for i in range(4)]
    by_group = [[a for a in answers if a["dp"] == group] for group in range(2)]
    indices = [{tuple(a["indices"]) for a in group} for group in by_group]
    assert [len(i) for i in indices] == [1, 1], "ranks of one context mesh take the same samples"
    first, second = (set(i.pop()) for i in indices)
    assert not first & second
    assert first | second == set(range(12))
    for group in by_group:
        for rows in range(3):
            tokens = sorted(t for a in group for sample in a["batches"][rows][0] for t in sample)
            assert len(tokens) == len(set(tokens)) == 16, "the shards of a group are whole windows"
        for answer in group:
            inputs = {t for x, _ in answer["batches"] for sample in x for t in sample}
            # Nothing but its own chunks, and the label after each.
            assert len(inputs) == 6 * 2
            assert set(answer["read"]) == inputs | {t + 1 for t in inputs}
            assert {t % 8 for t in inputs} in chunks
            assert all(
                y[i][j] == x[i][j] + 1 for x, y in answer["batches"] for i in range(len(x)) for j in range(len(x[i]))
            )


def resumed(consumed: int) -> tuple[list[int], list[int], int]:
    dataset = SequenceDataset(STREAM, 8)
    first, second = (SequenceSampler(dataset, seed=5) for _ in range(2))
    first.set_epoch(2)
    iterator = iter(DataLoader(dataset, batch_size=1, sampler=first))
    for _ in range(consumed + 3):  # a loader reads ahead of the trainer
        next(iterator)
    first.set_epoch(2)
    everything = list(first)
    second.load_state_dict(first.state_after(consumed))
    left = len(second)
    return everything, list(second), left


def test_resuming_goes_on_where_workers_read_samples_alone() -> None:
    """Where the loader asks for the sampler's iterator twice, and leaves the first."""
    dataset = SequenceDataset(STREAM, 8)
    sampler = SequenceSampler(dataset, seed=5)
    everything = list(sampler)
    sampler.load_state_dict(sampler.state_after(9))
    read = [x.tolist() for x, _ in DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=1)]
    assert read == [dataset[index][0].tolist() for index in everything[9:]]


@pytest.mark.parametrize("consumed", [0, 1, 7])
def test_resuming_goes_on_where_the_trainer_was(consumed: int) -> None:
    everything, rest, left = resumed(consumed)
    assert rest == everything[consumed:]
    assert left == len(rest)


def test_after_a_resumed_epoch_comes_a_whole_one() -> None:
    sampler = SequenceSampler(SequenceDataset(STREAM, 8), seed=5)
    sampler.load_state_dict(sampler.state_after(4))
    assert len(list(sampler)) == 8
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(sampler) == 12


def test_the_same_epoch_again_is_whole() -> None:
    """A loader that is asked twice, with no epoch set in between."""
    sampler = SequenceSampler(SequenceDataset(STREAM, 8), seed=5)
    sampler.load_state_dict(sampler.state_after(4))
    assert [len(list(sampler)) for _ in range(2)] == [8, 12]
    assert len(sampler) == 12


def test_another_epoch_than_the_resumed_one_is_whole() -> None:
    sampler = SequenceSampler(SequenceDataset(STREAM, 8), seed=5)
    sampler.load_state_dict(sampler.state_after(4))
    sampler.set_epoch(0)
    assert len(sampler) == 8
    sampler.set_epoch(1)
    assert len(list(sampler)) == 12


@pytest.mark.parametrize("kind", [np.int32, np.int64, torch.tensor])
def test_numbers_of_other_libraries(kind: Callable[[int], Any]) -> None:
    """One of 32 bits times a length is none of these."""
    dataset = SequenceDataset(range(2**40), 2**16)  # pyrefly: ignore[bad-argument-type]
    for index in (40_000, -1):
        index_there = torch.tensor(index, dtype=torch.int32) if kind is torch.tensor else kind(index)
        assert dataset[index_there][0].equal(dataset[index][0])
        assert dataset[index][0][0] == index % len(dataset) * 2**16
    sampler = SequenceSampler(SequenceDataset(STREAM, 8))
    state = sampler.state_after(kind(3))  # pyrefly: ignore[bad-argument-type]
    assert type(state["consumed"]) is int
    sampler.load_state_dict(state)
    with pytest.raises(TypeError):
        sampler.state_after(3.0)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("consumed", [-1, 13])
def test_more_than_an_epoch_cannot_be_consumed(consumed: int) -> None:
    with pytest.raises(ValueError, match=f"from 0 to the epoch's 12 samples, got {consumed}"):
        SequenceSampler(SequenceDataset(STREAM, 8)).state_after(consumed)


def test_a_loader_that_saves_states_asks_none_of_a_sampler() -> None:
    """torchdata's calls ``state_dict()`` of what has both methods of its protocol, and reads ahead of the trainer."""
    assert not hasattr(SequenceSampler, "state_dict")


@pytest.mark.parametrize("stream", [np.arange(9.0), np.zeros((9, 2), dtype=int), torch.rand(9)])
def test_tokens_are_a_stream_of_integers(stream: object) -> None:
    with pytest.raises(TypeError, match="one-dimensional stream of integers"):
        SequenceDataset(stream, 4)[0]


@pytest.mark.parametrize("change", [{"seed": 6}, {"shuffle": False}])
def test_a_state_of_another_sampler_is_refused(change: dict) -> None:
    dataset = SequenceDataset(STREAM, 8)
    saved = SequenceSampler(dataset, seed=5).state_after(3)
    with pytest.raises(ValueError, match="the saved sampler had"):
        SequenceSampler(dataset, **({"seed": 5} | change)).load_state_dict(saved)
    SequenceSampler(dataset, seed=np.int64(5)).load_state_dict(saved | {"seed": np.int64(5), "shuffle": 1})
    for part in ({"samples": 12.0}, {"shuffle": "yes"}, {"seed": torch.tensor([5, 6])}):
        with pytest.raises(ValueError, match=f"the saved sampler had {next(iter(part))}="):
            SequenceSampler(dataset, seed=5).load_state_dict(saved | part)
    with pytest.raises(ValueError, match="the saved sampler must be a mapping, got None"):
        SequenceSampler(dataset).load_state_dict(None)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="samples=12, this one has 10"):
        SequenceSampler(SequenceDataset(STREAM, 10), seed=5).load_state_dict(saved)


@pytest.mark.parametrize("seed", [None, 1.5, True, -1, 2**63, "7"])
def test_a_seed_that_is_none_is_refused_at_once(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"seed must be a whole number from 0 to 2\*\*63 - 1"):
        SequenceSampler(SequenceDataset(STREAM, 8), seed=seed)
    for taken in (np.int64(7), 2**63 - 1):
        assert len(list(SequenceSampler(SequenceDataset(STREAM, 8), seed=taken))) == 12  # pyrefly: ignore[bad-argument-type]


def test_data_parallelism_is_one_axis() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp_ring"))
        with pytest.raises(ValueError, match=r"must be a mesh of one axis, got \('dp', 'cp_ring'\); slice it first"):
            SequenceSampler(SequenceDataset(STREAM, 8), mesh["cp_ring"], data_parallel=mesh)


def test_a_memory_map_of_which_a_file_is_no_copy_is_sent_whole(tmp_path: Path) -> None:
    np.arange(700, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    changed = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="c")
    changed[0] = 7
    gone = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    assert pickle.loads(pickle.dumps(SequenceDataset(changed, 64)))[0][0][0] == 7
    told = SequenceDataset(gone, 64)
    (tmp_path / "tokens.bin").unlink()
    assert torch.equal(pickle.loads(pickle.dumps(told))[1][0], told[1][0])


@pytest.mark.parametrize("part", [slice(None), slice(100, 5000)])
def test_a_memory_map_is_sent_to_workers_as_its_file(tmp_path: Path, part: slice) -> None:
    """Where they are not forked, and numpy would send all its numbers."""
    whole = np.arange(7000, dtype=np.uint16)
    (tmp_path / "tokens.bin").write_bytes(b"head" + whole.tobytes())
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r", offset=4)[part]
    dataset = SequenceDataset(tokens, 64)
    told = pickle.dumps(dataset)
    assert len(told) < 1000
    again = pickle.loads(told)
    assert isinstance(again.tokens, np.memmap)
    assert len(again) == len(dataset)
    assert all(torch.equal(x, y) for i in (0, 5, -1) for x, y in zip(again[i], dataset[i], strict=True))
    assert torch.equal(pickle.loads(pickle.dumps(SequenceDataset(whole, 64)))[3][0], SequenceDataset(whole, 64)[3][0])

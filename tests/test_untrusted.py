"""What is read from disk is data that nobody vouches for: it is read, or refused in a line; see docs/testing.md."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from recipes.benchmarks.cluster import record
from recipes.benchmarks.cluster.cases import cases, contenders
from tests.hostile import VALUES, broken, flipped
from tests.test_plan_presets import LLAMA
from wallfacer_dt import Cluster, Link, ModelShape, Profile, SequenceDataset, SequenceSampler, SequenceShape
from wallfacer_dt.command.app import main
from wallfacer_dt.command.planning.config import read_config
from wallfacer_dt.planning import Candidate, Measured
from wallfacer_dt.reading import FileError, read_bytes, read_json, read_packed_lines

CLUSTER = Cluster(4, 2, Link(1e9, 1e-6), Link(1e8), memory=10**10)
PROFILE = Profile(
    CLUSTER,
    (
        Measured(ModelShape(64, 4, 2), SequenceShape(256, is_causal=True), Candidate(4, order="head_tail"), 0.5),
        Measured(ModelShape(64, 4), SequenceShape(256, window_size=(8, None)), Candidate(2, 2), 0.25),
    ),
)
CASE = next(iter(cases()))
WAYS = {
    name: record.Measured(way, (0.1, 0.2), ((0.1, 0.2), (0.3, 0.4)), (0.05, 0.1), 1 << 20, (0.05, 0.1))
    for name, way in list(contenders(CASE).items())[:2]
}
RESULT = record.Result(CASE, "abc", "2 cores", WAYS, (0.1, 0.2), 3.0)


def profile_of(path: Path) -> object:
    """And what was read is what is written, and can be looked up."""
    found = Profile.load(path)
    found.save(path)
    assert Profile.load(path) == found
    return [found.seconds(one.candidate, one.model, one.sequence) for one in found.measured]


def results_of(path: Path) -> object:
    """And whatever is read can be shown, and written again."""
    path.write_bytes(gzip.compress(path.read_bytes().replace(b"\n", b"") + b"\n"))
    found = record.read(path)
    shown = [[way.spread + way.error + sum(way.over_busy) for way in one.ways.values()] for one in found.values()]
    return [case.name for case in found], shown, json.dumps([asdict(one) for one in found.values()]).encode()


def packed_of(path: Path) -> object:
    """Broken after it was compressed."""
    path.write_bytes(flipped(gzip.compress(path.read_bytes(), mtime=0), Random(path.stat().st_size)))
    return record.read(path)


@pytest.fixture
def valid(tmp_path: Path) -> Callable[[Callable[[Path], object]], dict[str, Any]]:
    """What each reader takes."""
    PROFILE.save(tmp_path / "valid.json")
    profile = json.loads((tmp_path / "valid.json").read_text())
    known = {profile_of: profile, read_config: LLAMA, results_of: json.loads(json.dumps(asdict(RESULT)))}
    return lambda reader: known.get(reader, known[results_of])


READERS = (profile_of, read_config, results_of, packed_of)


def outcome(reader: Callable[[Path], object], path: Path) -> str:
    """Empty, or why it was refused: in a line that begins with the path and that a terminal shows as it is."""
    try:
        reader(path)
    except FileError as error:
        said = str(error)
    except ValueError as error:
        said = str(error)
        assert reader is read_config, said
    else:
        return ""
    assert said.startswith(str(path)), said
    assert said.isprintable(), said
    assert len(said) < 500 + len(str(path))
    return said


@pytest.mark.parametrize("many", [pytest.param(100, id="few"), pytest.param(1300, marks=pytest.mark.whole, id="many")])
@pytest.mark.parametrize("reader", READERS)
def test_broken_files_are_refused_in_a_line(reader: Callable, many: int, valid: Callable, tmp_path: Path) -> None:
    """5,200 of them in ``make test-all``; nothing but ValueError, and most of them are."""
    path, refused = tmp_path / "file.json", 0
    path.write_text(json.dumps(valid(reader)))
    if reader is not packed_of:
        assert not outcome(reader, path)
    for seed in range(many):
        path.write_bytes(broken(valid(reader), Random(seed)))
        refused += bool(outcome(reader, path))
    assert refused > 0.6 * many
    assert refused < many or reader is packed_of


@pytest.mark.parametrize("command", ["plan --profile", "plan --cluster h100x2 --model"])
def test_the_command_refuses_broken_files(
    command: str, valid: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wallfacer_dt.planning.plan", lambda *_, **__: pytest.fail("planned"))
    reader = profile_of if "profile" in command else read_config
    path, refused = tmp_path / "file.json", 0
    sizes = "--hidden 64 --heads 4" if reader is profile_of else ""
    for seed in range(30):
        path.write_bytes(broken(valid(reader), Random(seed)))
        if outcome(reader, path):
            refused += 1
            assert main([*command.split(), str(path), *f"--seq 8k --causal {sizes}".split()]) == 2
            printed = capsys.readouterr()
            assert printed.err.startswith(f"wallfacer plan: {command.split()[-1]}: {path}")
            assert (printed.err.count("\n"), printed.out) == (1, "")
    assert refused > 15


def test_no_more_memory_is_taken_than_a_file_may_have(tmp_path: Path) -> None:
    """A list is 20 times as large as its text; a bomb of gzip 1000 times."""
    path = tmp_path / "large"

    def peak(reader: Callable[[Path], object]) -> int:
        tracemalloc.start()
        try:
            assert outcome(reader, path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with path.open("wb") as file:
        file.truncate(2**36)  # a hole
    for reader in (profile_of, read_config, record.read):
        assert peak(reader) < 2**26
    path.write_bytes(gzip.compress(bytes(2**27)))
    assert peak(record.read) < 2**26
    for text in ("[" + "[]," * 2**20 + "[]]", '{"a": "' + "x" * 2**22 + '"}', '{"measured": [' + "0," * 2**20 + "0]}"):
        path.write_text(text[: 2**22])
        assert peak(Profile.load) < 2**27
    path.write_text("{" + ",".join(f'"{i}": 0' for i in range(2**17)) + ', "0": 1}')
    assert "'0' is there twice" in outcome(Profile.load, path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").touch()
    (tmp_path / "device").symlink_to("/dev/zero")
    said = {
        "pipe": " is no file",
        "loop": ": Too many",
        "empty": " is empty",
        "device": " is no file",
        ".": ": Is a dir",
    }
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for name, message in (said | {"none": ": No such file", "a\0b": r"\x00b: embedded null byte"}).items():
        with pytest.raises(FileError) as caught:
            read_bytes(f"{tmp_path}/{name}", 100)
        assert message in str(caught.value)
    assert not descriptors or len(os.listdir("/proc/self/fd")) == descriptors
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_text("{}")
    assert read_json(tmp_path / "link", 2) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 33 + "]" * 33, "is no JSON: it is nested deeper than 32"),
        (
            "[" * 900 + "]" * 900,
            "is no JSON: it is nested deeper than 32",
        ),  # to show it took more stack than to read it
        ("1e999", "is no JSON: 1e999 is too large a number"),
        ("1" * 4301, "is no JSON: Exceeds the limit"),
    ],
)
def test_what_readers_need_not_look_for(value: str, message: str, tmp_path: Path) -> None:
    """Even where nobody asks for it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-1] + f', "sliding_window": {value}}}')
    with pytest.raises(FileError, match=message):
        read_config(str(path))


def test_a_record_that_is_cut_short_is_not_a_shorter_record(tmp_path: Path) -> None:
    path, lines = tmp_path / "record.gz", b'{"a": 1}\n{"b": 2}\n'
    path.write_bytes(gzip.compress(lines))
    assert read_packed_lines(path, 100) == [{"a": 1}, {"b": 2}]
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1], "is cut short"),
        (whole + b"\0", "has more bytes behind its end"),
        (gzip.compress(lines[:-1]), "is cut short: its last line does not end"),
        (lines, "is not compressed by gzip"),
        (gzip.compress(bytes(101)), "has more than 100 bytes when decompressed"),
    ):
        path.write_bytes(content)
        with pytest.raises(FileError, match=message):
            read_packed_lines(path, 100)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 1, "its version is 1, this is 6; profile again"),
        (("version",), True, "its version is True, this is 6"),
        (("version",), 2.0, r"its version is 2\.0, this is 6"),
        (("cluster", "ranks"), 10**9, "cluster: ranks must be at most 999999, got 1000000000"),
        (("cluster", "ranks"), 4.0, r"cluster.ranks must be a whole number, got 4\.0"),
        (("cluster", "ranks"), True, "cluster.ranks must be a whole number, got True"),
        (("cluster", "nics"), 2**63, "cluster.nics must be a number of 64 bits"),
        (("cluster", "memory"), -5, "cluster: memory must be above 0 and finite, got -5"),
        (("cluster", "striped_gathers"), 1, "cluster.striped_gathers must be true or false, got 1"),
        (("cluster", "intra", "bandwidth"), "1", "cluster.intra.bandwidth must be a number, got '1'"),
        (("cluster", "intra", "bandwidth"), 1e-31, "cluster.intra.bandwidth must be 0, or from 1e-30 to 1e.30 in size"),
        (
            ("cluster", "intra", "latency"),
            -1.0,
            "cluster.intra: a link's latency must be at least 0 and finite, got -1",
        ),
        (("cluster", "intra", "colour"), 1, "cluster.intra.colour is not known"),
        (("measured", 0, "seconds"), 0, r"measured\[0\]: seconds must be above 0 and finite, got 0"),
        (("measured", 1, "candidate", "ring"), 4, r"measured\[1\]\.candidate has 8 ranks, the cluster 4"),
        (
            ("measured", 1, "candidate", "placement"),
            [],
            r"measured\[1\]\.candidate\.placement must be one of .*, got \[\]",
        ),
        (("measured", 1, "sequence", "dtype"), "load", r"measured\[1\]\.sequence\.dtype must be one of .*, got 'load'"),
        (("measured", 1, "sequence", "window_size"), [1], r"measured\[1\]\.sequence\.window_size must be a list of 2"),
        (("measured", 1, "candidate", "order"), "\x1b[2J", r"measured\[1\]\.candidate\.order must be a printable text"),
    ],
)
def test_a_profile_that_is_none(path: tuple, value: object, message: str, valid: Callable, tmp_path: Path) -> None:
    made, file = valid(profile_of), tmp_path / "profile.json"
    holder = made
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    file.write_text(json.dumps(made))
    with pytest.raises(FileError, match=f"is no profile: {message}"):
        Profile.load(file)


def test_a_profile_does_not_outgrow_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PROFILE.save(tmp_path / "profile.json")
    monkeypatch.setattr("wallfacer_dt.planning.profiling._MOST_BYTES", (tmp_path / "profile.json").stat().st_size - 1)
    with pytest.raises(FileError, match=r"would have more than .* bytes; name another file"):
        PROFILE.save(tmp_path / "profile.json")


@pytest.mark.parametrize("latency", [float("nan"), float("inf"), -1.0])
def test_a_link_has_a_latency(latency: float) -> None:
    with pytest.raises(ValueError, match="latency must be at least 0 and finite"):
        Link(1e9, latency)


def test_a_samplers_state_is_checked() -> None:
    sampler = SequenceSampler(range(10))  # type: ignore[arg-type]
    state = sampler.state_after(3)
    for name in state:
        with pytest.raises(ValueError, match=f"the saved sampler has no {name}"):
            sampler.load_state_dict({key: value for key, value in state.items() if key != name})
    for name in ("epoch", "consumed"):
        for value in VALUES:
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10:
                continue
            if name == "epoch" and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
                continue
            with pytest.raises(ValueError, match=f"the saved sampler's {name} must be a whole number from 0 to "):
                sampler.load_state_dict(state | {name: value})
    sampler.load_state_dict(state)
    assert len(list(sampler)) == 7


class Shrunk:
    """A file that became shorter after it was opened."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, rows: slice) -> bytes:
        return bytes(50)[rows]


def test_tokens_that_are_none_or_gone() -> None:
    dataset = SequenceDataset(Shrunk(), 10)
    assert dataset[3][0].shape == (10,)
    with pytest.raises(ValueError, match="the stream ends at token 50, its length was 100"):
        dataset[4]
    large = SequenceDataset(np.array([1, 2, 2**63], dtype=np.uint64), 2)
    with pytest.raises(ValueError, match="token 9223372036854775808 is none: more than 63 bits"):
        large[0]
    assert torch.equal(SequenceDataset(np.array([1, 2, 3], dtype=np.uint64), 2)[0][1], torch.tensor([2, 3]))

"""`footprint --lengths`: the batch of the longest rows, which the first steps do not draw."""

import json

import pytest

from footprint.__main__ import main
from footprint.kernels.measure import recorded_peak

HEAD = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

LENGTHS = [5, 9, 7, 8] * 8
MULTIPLE = 1
rows = [dict(input_ids=[*range(length)], labels=[*range(length)], kind=3) for length in LENGTHS]


def collate(rows):
    most = max(len(row["input_ids"]) for row in rows)
    most = -(-most // MULTIPLE) * MULTIPLE
    batch = {}
    for name in ("input_ids", "labels"):
        padded = [row[name] + [0] * (most - len(row[name])) for row in rows]
        batch[name] = torch.tensor(padded)
    batch["mask"] = batch["input_ids"] > 0
    return batch


def endless(loader):
    while True:
        yield from loader


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 64), nn.Linear(64, 2000))
optimizer = torch.optim.AdamW(model.parameters())
batches = endless(DataLoader(rows, batch_size=4, collate_fn=collate))
"""
STEP = """
batch = next(batches)
logits = model(batch["input_ids"])[batch["mask"]]
loss = nn.functional.cross_entropy(logits, batch["labels"][batch["mask"]])
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""
TEXT = HEAD + "while True:" + STEP.replace("\n", "\n    ")
LONG = [180, 12, 333, 250, 31, 77, 301]
BATCH = "LENGTHS = [333, 301, 250, 180]"  # the longest rows that one batch can have


@pytest.fixture
def found(tmp_path, capsys):
    """Answers a command about a script of this text: the exit code, the results, and what was
    said of errors.
    """

    def answer(text: str, *flags: str):
        (tmp_path / "train.py").write_text(text)
        results = tmp_path / "found.json"
        words = ["--gpu", "cpu", "--json", str(results), *flags, str(tmp_path / "train.py")]
        code = main(words)
        read = json.loads(results.read_text()) if results.exists() else {}
        return code, read, capsys.readouterr().err

    return answer


def measured(head: str) -> int:
    """What the allocator records of the script's third step."""
    names: dict = {}

    def first() -> None:
        exec(head, names)
        exec(STEP, names)
        exec(STEP, names)

    return recorded_peak(first, lambda _: exec(STEP, names))


@pytest.mark.parametrize("multiple", [1, 64])
def test_the_longest_batch_is_predicted_as_it_is_measured(multiple, found, tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps(LONG))
    rounded = f"MULTIPLE = {multiple}"
    code, results, _ = found(TEXT.replace("MULTIPLE = 1", rounded), "--lengths", str(lengths))
    real = HEAD.replace("MULTIPLE = 1", rounded).replace("LENGTHS = [5, 9, 7, 8] * 8", BATCH)
    assert code == 0
    assert results["peak_live_bytes"] == pytest.approx(measured(real), rel=0.001)
    assert any("--lengths" in line and "333" in line for line in results["assumed"])


DICTIONARIES = HEAD[HEAD.index("rows =") : HEAD.index("def endless")]
TENSORS = """
rows = [(torch.arange(length), 3) for length in LENGTHS]


def collate(rows):
    ids = pad_sequence([ids for ids, _ in rows])  # tokens first
    return dict(input_ids=ids, labels=ids, mask=ids > 0)


"""


def test_rows_may_be_tuples_and_tokens_the_first_dimension(found):
    text = TEXT.replace(DICTIONARIES, TENSORS)
    assert text != TEXT
    code, results, _ = found(text, "--lengths", "290")
    long = HEAD.replace(DICTIONARIES, TENSORS).replace("[5, 9, 7, 8] * 8", "[290] * 4")
    assert code == 0
    assert results["peak_live_bytes"] == pytest.approx(measured(long), rel=0.001)


def test_masks_of_rows_that_the_script_makes_are_known(found):
    head = HEAD.replace(DICTIONARIES, TENSORS).replace("[5, 9, 7, 8] * 8", "[190] * 4")
    text = TEXT.replace(HEAD, head)
    assert found(text)[1]["peak_live_bytes"] == pytest.approx(measured(head), rel=0.001)


def test_a_file_of_lines_and_one_of_numpy_say_the_same(found, tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "lengths.npy", numpy.array(LONG))
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, LONG)))
    files = (str(tmp_path / name) for name in ("lengths.npy", "lengths.txt"))
    one, other = (found(TEXT, "--lengths", file)[1] for file in files)
    assert one["peak_live_bytes"] == other["peak_live_bytes"] > 4 * 1064 * 2000


def test_a_number_is_the_length_of_all_rows_also_if_they_are_longer(found):
    peaks = [found(TEXT, "--lengths", length)[1]["peak_live_bytes"] for length in ("3", "300")]
    plain = found(TEXT)[1]["peak_live_bytes"]
    assert peaks[0] < plain < peaks[1]


NO_PADDING = TEXT.replace(", collate_fn=collate", "")
WHOLE_BATCHES = TEXT.replace("batch_size=4", "batch_size=None")
WORDS = TEXT.replace("input_ids=[*range(length)], labels=[*range(length)], kind=3", "text='a'")


@pytest.mark.parametrize(
    "text, lengths, said",
    [
        (NO_PADDING, "300", "train.py:"),
        (WORDS, "300", "train.py:"),
        (WHOLE_BATCHES, "300", "train.py:"),
        (TEXT.replace("input_ids=[*range(length)]", "input_ids=[[3]]"), "300", "train.py:"),
        (TEXT.replace("next(batches)", "collate(rows[:4])"), "300", "no DataLoader"),
        (TEXT, "0", "--lengths 0"),
        (TEXT, "nowhere.txt", "no such file"),
        (TEXT, __file__, "cannot be read"),
    ],
)
def test_lengths_that_mean_nothing_are_refused_in_one_line(text, lengths, said, found):
    code, _, error = found(text, "--lengths", lengths)
    (line,) = [
        line for line in error.splitlines() if line.startswith("footprint: -") or said in line
    ]
    assert code == 4
    assert "--lengths" in line and said in line

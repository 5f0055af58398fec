"""No foreign code runs: what the product must never call, what opens no pickle, what a header may
hold.
"""

import ast
import json
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base import durable, tensors
from base.untrusted import is_pickle, parse_json, read_json, refuse_pickle
from longhaul.checkpoint.format import checksum
from longhaul.checkpoint.load import load_model, verified
from tests.readers import evil_pickle, make_checkpoint
from tests.test_architecture import SOURCES, parsed

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
    "yaml",
    "commands",
    "imp",
}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.package.PackageImporter",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "pd.read_pickle",
    "pandas.read_pickle",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
KEYWORDS = {
    "shell": False,
    "allow_pickle": False,
    "weights_only": True,
    "trust_remote_code": False,
}  # the only value that each may have


def foreign_code(tree: ast.AST) -> list[str]:
    """Calls in a module that can run code from a file or a string, as line:call."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if ast.unparse(node) == "from pickle import dumps":  # which only writes
                continue
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            found += [
                f"{node.lineno}:import {name}" for name in names if name.split(".")[0] in MODULES
            ]
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            wrong = [
                word.arg
                for word in node.keywords
                if word.arg in KEYWORDS
                and getattr(word.value, "value", None) is not KEYWORDS[word.arg]
            ]
            if call in CALLS or wrong or call.rsplit(".", 1)[-1] in ("read_pickle", "load_pickle"):
                found.append(f"{node.lineno}:{call}({', '.join(wrong)})")
            if call in ("np.load", "numpy.load") and not any(
                word.arg == "allow_pickle" for word in node.keywords
            ):
                found.append(f"{node.lineno}:{call} without allow_pickle=False")
    return found


def test_the_product_runs_no_foreign_code():
    found = {path: foreign_code(parsed(path)) for path in SOURCES}
    assert not {path: calls for path, calls in found.items() if calls}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "from pickle import dumps, loads",
        "import yaml",
        "eval('1')",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "yaml.load(text)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, allow_pickle=flag)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=flag)",
        "os.system(command)",
        "pd.read_pickle(path)",
        "__import__(name)",
        "from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_check_finds_each_way_to_run_foreign_code(code):
    assert foreign_code(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "from pickle import dumps",
        "torch.compile(layer)",
        "np.load(path, allow_pickle=False)",
        "subprocess.run(command, shell=False)",
        "json.load(file)",
        "regex.compile(text)",
    ],
)
def test_the_check_leaves_harmless_calls_alone(code):
    assert not foreign_code(ast.parse(code))


def test_an_evil_pickle_would_run_code_if_it_were_opened(tmp_path):
    pickle.loads(evil_pickle(tmp_path / "mark"))
    assert (tmp_path / "mark").exists()


def test_a_shard_that_is_a_pickle_is_not_opened_although_its_manifest_fits(tmp_path):
    manifest, _, name = make_checkpoint(tmp_path)
    folder = tmp_path / "step-00000000"
    (folder / name).write_bytes(evil_pickle(tmp_path / "mark"))
    manifest["files"][name] |= durable.describe(folder / name)
    content = manifest | {"checksum": checksum(manifest)}
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was not opened"):
        load_model(verified(folder))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_is_known_by_its_first_bytes_whatever_its_name(tmp_path, protocol):
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps({"a": [1, 2]}, protocol=protocol))
    assert is_pickle(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="was not opened: convert to safetensors"):
        refuse_pickle(tmp_path / "model.safetensors")


@settings(max_examples=300, deadline=None)
@given(length=st.integers(2, 2**21))
def test_no_safetensors_header_is_taken_for_a_pickle(tmp_path_factory, length):
    path = tmp_path_factory.getbasetemp() / "one.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b'{"a"')
    assert not is_pickle(path)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b'{"x": {"a": 1, "b": 2, "a": 1}}',
        b"[" * 100_000,
        b"\xff",
        b"{",
        b"1" * 5000,
        b'{"a"',
    ],
)
def test_json_is_refused_as_a_value_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_beyond_the_limit_is_not_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(["x" * 100]))
    assert read_json(tmp_path / "a.json", 200) == ["x" * 100]
    with pytest.raises(ValueError, match="larger than 50 bytes"):
        read_json(tmp_path / "a.json", 50)


def tensor(shape: tuple = (2,), offsets: tuple = (0, 8)) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


def header(**tensors: dict) -> bytes:
    return json.dumps(tensors).encode()


@pytest.mark.parametrize(
    "text, length",
    [
        (b" " * 8, 2**63),
        (b" " * (200 * 2**20), 200 * 2**20),
        (header(a=tensor(), b=tensor()), None),
        (header(a=tensor(offsets=(8, 16))), None),
        (header(a=tensor((40,), (0, 160))), None),
        (header(a=tensor(), b=tensor(offsets=(8, 16))).replace(b'"b"', b'"a"'), None),
        (header(a=tensor((2**62, 4, 2))), None),
    ],
    ids=["claims", "long", "overlap", "hole", "outside", "twice", "overflow"],
)
def test_a_header_that_is_no_plan_of_the_file_is_refused(text, length, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length or len(text)) + text + bytes(16))
    with pytest.raises(ValueError, match=str(path)):
        tensors.read_tensors(path)
    good = header(a=tensor(), b=tensor(offsets=(8, 16)))
    path.write_bytes(struct.pack("<Q", len(good)) + good + bytes(16))
    assert tensors.read_tensors(path).keys() == {"a", "b"}


HEADERS = st.dictionaries(
    st.text(max_size=5),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "U8", "I64", "X"]),
            "shape": st.lists(st.integers(0, 4), max_size=3),
            "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2),
        }
    ),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(header=HEADERS, size=st.integers(0, 64))
def test_each_byte_of_a_file_that_is_read_belongs_to_one_tensor(tmp_path_factory, header, size):
    path = tmp_path_factory.getbasetemp() / "two.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    try:
        found = tensors.read_tensors(path)
    except ValueError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) == size

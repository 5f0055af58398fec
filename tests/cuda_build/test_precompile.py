"""benchmarks.gpu --precompile: every kernel of a step compiles for a card that is not here, with
the Triton of a CUDA build of torch. Other tests compile those of attention for other cards.
"""

import pytest

from benchmarks.gpu import command, kernels, precompile


@pytest.mark.slow
def test_every_kernel_compiles_into_a_folder_that_can_be_carried(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(precompile, "TOKENS", precompile.TOKENS[:1])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert command.main(["--precompile", str(tmp_path), "--capability", "90"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in kernels.found()), printed
    assert len(list(tmp_path.glob("**/*.cubin"))) >= len(kernels.found())

"""NSAConfig: the sizes of Native Sparse Attention. Imports nothing of ours."""
from dataclasses import dataclass


@dataclass(frozen=True)
class NSAConfig:
    """Sizes of Native Sparse Attention (arXiv 2502.11089), in tokens and blocks; letters of the paper in brackets."""
    cmp_block: int = 32    # tokens in a compressed block [l]
    cmp_stride: int = 16   # tokens from one compressed block to the next [s]
    sel_block: int = 64    # tokens in a selection block [l']
    sel_count: int = 16    # selection blocks that a query reads [n], the forced ones included
    sel_init: int = 1      # of these, the first blocks of the document
    sel_local: int = 2     # of these, the query's own block and those before it
    window: int = 512      # tokens of the sliding window [w], the query itself included
    cmp_kind: str = "mlp"  # compression: "mlp" learns, "mean" pools
    kv: str = "shared"     # "shared": one K/V for all branches; "separate": one per branch

    def __post_init__(self):
        for name in ("cmp_block", "cmp_stride", "sel_block", "sel_count", "sel_local", "window"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}", "at least 1", f"raise {name}")
        _require(self.sel_init >= 0, f"sel_init={self.sel_init}", "0 or more", "raise sel_init")
        for name in ("cmp_block", "sel_block"):
            size = getattr(self, name)
            _require(size % self.cmp_stride == 0, f"{name}={size}, cmp_stride={self.cmp_stride}",
                     f"{name} a multiple of cmp_stride", f"change cmp_stride or {name}")
        _require(self.cmp_block <= self.sel_block, f"cmp_block={self.cmp_block}, sel_block={self.sel_block}",
                 "cmp_block <= sel_block", "lower cmp_block or raise sel_block")
        _require(self.sel_count >= self.sel_init + self.sel_local,
                 f"sel_count={self.sel_count}, sel_init={self.sel_init}, sel_local={self.sel_local}",
                 "sel_count >= sel_init + sel_local", "raise sel_count or force fewer blocks")
        _require(self.cmp_kind in ("mlp", "mean"), f"cmp_kind={self.cmp_kind!r}", "'mlp' or 'mean'", "choose one of them")
        _require(self.kv in ("separate", "shared"), f"kv={self.kv!r}", "'separate' or 'shared'", "choose one of them")

    def compressed_blocks(self, tokens):
        """Number of compressed blocks of a document: those that lie wholly inside it."""
        return 0 if tokens < self.cmp_block else (tokens - self.cmp_block) // self.cmp_stride + 1


def _require(holds, given, allowed, remedy):
    if not holds:
        raise ValueError(f"NSAConfig: given {given}; allowed: {allowed}; remedy: {remedy}")

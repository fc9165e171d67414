"""Tiles for normalisation whose rows are centred: both packages start from them.

Two sums of a row follow each other, and the warps of a tile wait for one another at each: few warps wait less.
"""


def forward_tile(width: int, rows: int) -> tuple[int, int]:
    """Rows, of those that other tiles would have, and warps of a tile of rows that are `width` wide, up to 8192."""
    rows = min(max(2048 // width, 1), rows)
    return rows, min(max(rows * width // (1024 if width < 4096 else 512), 1), 8)


def backward_tile(width: int, *, few: bool, added: bool) -> tuple[int, int, int]:
    """Elements of a tile, elements of each of its warps, and the most steps ahead; with few warps or as other tiles."""
    if few and width == 4096:
        return 8192, 1024, 3
    return 4096, 1024 if few and not added else 512, 4

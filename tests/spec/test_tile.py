"""Tiles name themselves, and read themselves from the command line."""

from dataclasses import fields, replace

import pytest
from flashsmith.errors import IllegalTile
from flashsmith.spec.kernel import TILE_OF
from flashsmith.spec.tile import ALL_HEADS, ForwardTile, KeyBlockTile, RowTile, parse_tile, tile_key, tile_text

TILE = ForwardTile(Br=128, Bc=64, warps=4)


@pytest.mark.parametrize("kind", dict.fromkeys(TILE_OF.values()), ids=lambda kind: kind.__name__)
def test_every_field_is_in_the_key(kind: type) -> None:
    """Two tiles that differ have different keys: a key names a folder of the cache."""
    assert list(kind.short) == [field.name for field in fields(kind)]
    assert len(set(kind.short.values())) == len(kind.short)


def test_young_fields_leave_older_keys_as_they_were() -> None:
    """Keys are in cached builds, records' sources and spills.json: a default value of a new field adds nothing."""
    assert tile_key(TILE) == "Br128_Bc64_w4_q0_lazy0_b1"
    assert tile_key(replace(TILE, order=ALL_HEADS, ascending=True)) == "Br128_Bc64_w4_q0_lazy0_b1_o2_up1"
    keys = KeyBlockTile(Br=64, Bc=128, warps=8)
    assert tile_key(replace(keys, order=ALL_HEADS)) == tile_key(keys) + "_o2"


def test_text_reads_back() -> None:
    other = ForwardTile(Br=64, Bc=48, warps=8, q_steps=2, lazy=True, min_blocks=2, order=ALL_HEADS, ascending=True)
    assert parse_tile(tile_text(other), TILE) == other
    assert tile_key(other) != tile_key(TILE)


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("Bd=64", ["Bd", "Br, Bc, warps"]),
        ("Br=large", ["large", "whole number"]),
        ("Br=-64", ["-64", "whole number"]),
        ("lazy=2", ["lazy", "0 or 1"]),
    ],
    ids=["field", "word", "negative", "flag"],
)
def test_refusals(text: str, needles: list[str]) -> None:
    with pytest.raises(IllegalTile) as error:
        parse_tile(text, TILE)
    assert all(needle in str(error.value) for needle in needles)


def test_only_named_fields_change() -> None:
    assert parse_tile("", RowTile(warps=2)) == RowTile(warps=2)
    assert parse_tile("Bc=32", TILE) == ForwardTile(Br=128, Bc=32, warps=4)

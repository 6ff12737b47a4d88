"""The 21 control bits of an instruction."""

import pytest
from flashsmith.sass import decode_control

# (high word as nvdisasm -hex prints it, what its schedule says)
KNOWN = [
    (0x000FE40000000F00, "B------:R-:W-:-:S02"),  # MOV R1, c[0x0][0x28]
    (0x000E620000002100, "B------:R-:W1:-:S01"),  # S2R R0, SR_TID.X
    (0x002FE400000006FF, "B-1----:R-:W-:-:S02"),  # SHF.L that reads the S2R
    (0x000FCA00078EC0FF, "B------:R-:W-:Y:S05"),  # LOP3 with the yield bit clear
]


@pytest.mark.parametrize(("high", "text"), KNOWN, ids=["stall", "write", "wait", "yield"])
def test_words_from_a_listing(high, text):
    assert str(decode_control(high)) == text


def test_every_field_has_its_place():
    bits = 9 | 0 << 4 | 3 << 5 | 5 << 8 | 0b101001 << 11 | 0b1010 << 17
    control = decode_control(bits << 41 | 0x1FFFFFFFFFF)
    assert control == (9, True, 3, 5, (0, 3, 5), 0b1010)

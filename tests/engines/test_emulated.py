"""Arrays keep their elements and strides on their way to the emulator and back."""

from __future__ import annotations

import numpy as np
import pytest
from flashsmith.engines.emulated import EmulatedEngine

BASE = np.arange(2 * 3 * 4 * 8, dtype=np.uint16).reshape(2, 3, 4, 8)

VIEWS = {
    "whole": BASE,
    "heads reversed": BASE[:, ::-1],
    "all reversed": BASE[::-1, ::-1, ::-1, ::-1],
    "every second column": BASE[..., ::2],
    "some rows": BASE[:, :, 1:3],
    "transposed": BASE.transpose(0, 2, 1, 3),
    "broadcast": np.broadcast_to(BASE[:1, :1, :1], BASE.shape),
    "empty": BASE[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_arrives_as_it_is(name: str) -> None:
    engine, view = EmulatedEngine(), VIEWS[name]
    tensor = engine.tensor(view)
    assert tensor.shape == view.shape and tensor.strides == tuple(s // 2 for s in view.strides)
    np.testing.assert_array_equal(engine.read(tensor), view)
    np.testing.assert_array_equal(engine.read(engine.contiguous(tensor)), view)


def test_new_memory_is_poison_or_zero() -> None:
    engine = EmulatedEngine()
    assert np.isnan(engine.read(engine.empty((2, 3), np.float32))).all()
    assert not engine.read(engine.zeros((2, 3), np.float32)).any()

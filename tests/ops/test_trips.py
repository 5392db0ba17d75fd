"""Trips to memory, read from SASS: counted right in small programs, and AttnRes makes one."""

from __future__ import annotations

import pytest
from sass_listing import NONE, listing

from vllm.model_executor.models.kimi_k3_fast.ops import attn_res, build
from vllm.model_executor.models.kimi_k3_fast.ops.verify import sass
from vllm.model_executor.models.kimi_k3_fast.ops.verify.trips import of, trips


def numbers(*code: str | tuple[str, int, int]) -> list[int]:
    """Of the loads of a program behind the dependency wait."""
    return [trip for trip, _ in trips(sass.parse(listing("ACQBULK", *code, "EXIT"), []))]


def load(register: str, tells: int, awaits: int = 0) -> tuple[str, int, int]:
    return f"LDG.E R{register}, desc[UR4][R2.64]", tells, awaits


def test_loads_that_nobody_waits_for_are_one_trip():
    assert numbers(load("4", 0), load("5", 1), load("6", 2)) == [1, 1, 1]


def test_a_load_behind_the_use_of_another_is_a_second_trip():
    assert numbers(load("4", 0), ("FADD R7, R4, R4", NONE, 1), load("5", 1)) == [1, 2]


def test_who_waits_for_a_counter_waits_for_all_that_tell_it():
    other, own = ("FADD R7, R8, R8", NONE, 2), ("FADD R7, R5, R5", NONE, 2)
    assert numbers(load("4", 0), other, load("5", 1), load("6", 1), own) == [1, 1, 1]
    assert numbers(load("4", 0), load("5", 1), own, load("6", 1, awaits=1)) == [1, 1, 2]


def test_of_two_ways_the_longer_counts():
    way = ["@P0 BRA `(.L_x_1)", load("4", 0), ("FADD R7, R4, R4", NONE, 1), ".L_x_1:", load("5", 1)]
    assert numbers(*way) == [1, 2]


def test_groups_of_copies_are_waited_for_in_their_order():
    copy = "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]"
    close = ("LDGDEPBAR", 0, 0)
    assert numbers(copy, close, copy, close, "DEPBAR.LE SB0, 0x1", copy) == [1, 1, 2]
    assert numbers(copy, close, "DEPBAR.LE SB0, 0x1", copy) == [1, 1]
    assert numbers(copy, close, "DEPBAR.LE SB0, 0x0", copy, close, "DEPBAR.LE SB0, 0x0", copy) == [1, 2, 3]


@pytest.mark.parametrize("spec", [s for s in attn_res.specs() if s.config.world == 1], ids=lambda spec: str(spec.config)[:70])
def test_attn_res_makes_one_trip(spec: build.KernelSpec):
    """Its prefix and its pending delta had come in five, twice a layer."""
    found = of(spec, "sm_90a")
    assert found and max(trip for trip, _ in found) == 1

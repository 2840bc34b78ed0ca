"""The catalogue of machines, and what a scenario may change of it."""

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario.schema_model import Device as Section
from kvasir_sim.devices import CATALOGUE, device_from, device_of

NAMED_BY_THE_DESIGN = ["a100-80g", "a100-40g", "h100-sxm", "h100-pcie", "h200", "l40s", "rtx4090",
                       "rtx-pro-6000", "apple-m2-ultra", "apple-m4-max", "phone", "cpu-core"]  # fmt: skip


@pytest.mark.parametrize("name", NAMED_BY_THE_DESIGN)
def test_every_named_device_has_peaks_memory_and_a_source(name: str) -> None:
    device = device_of(name)
    assert device.name == name
    assert device.source
    assert device.memory_bytes is not None
    assert device.memory_bytes >= 8 << 30
    assert device.peak("bfloat16") >= device.peak("float32") > 0


def test_figures_stand_in_a_sensible_order() -> None:
    by_speed = ["cpu-core", "phone", "apple-m4-max", "rtx4090", "a100-80g", "h100-sxm"]
    peaks = [device_of(name).peak("bfloat16") for name in by_speed]
    assert peaks == sorted(peaks)
    assert device_of("h200").bandwidth_bytes_per_s > device_of("h100-sxm").bandwidth_bytes_per_s


def test_an_estimate_says_that_it_is_one() -> None:
    assert [name for name, device in CATALOGUE.items() if device.is_assumed] == [
        "phone",
        "cpu-core",
    ]


@pytest.mark.parametrize(
    ("typed", "hint"), [("A100", "a100-80g"), ("h100", "h100-sxm"), ("m2-ultra", "apple-m2-ultra")]
)
def test_an_unknown_name_lists_near_matches(typed: str, hint: str) -> None:
    with pytest.raises(
        ScenarioError, match=rf"'{typed}' is not in the catalogue; did you mean .*{hint}"
    ):
        device_of(typed)


def test_a_name_unlike_any_other_lists_them_all() -> None:
    with pytest.raises(ScenarioError, match=r"catalogue; known: a100-40g, .*cpu-core"):
        device_of("zzzz")


def test_given_numbers_win_over_the_presets() -> None:
    section = Section(preset="a100-80g", memory_bytes=10**9, flops=1e12, overhead_s=0.5)
    device = device_from("mine", section, "bfloat16")
    assert device.name == "mine"
    assert device.memory_bytes == 10**9
    assert device.peak("bfloat16") == 1e12
    assert device.overhead_s == 0.5
    assert device.bandwidth_bytes_per_s == device_of("a100-80g").bandwidth_bytes_per_s


def test_a_device_by_numbers_is_assumed_and_may_lack_memory() -> None:
    section = Section(flops=1e12, bandwidth_bytes_per_s=1e11)
    device = device_from("mine", section, "float32")
    assert device.is_assumed
    assert device.memory_bytes is None
    with pytest.raises(ScenarioError, match="device mine: no FLOP/s for bfloat16; it has float32"):
        device.peak("bfloat16")

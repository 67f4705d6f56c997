"""The table of GPUs: complete, sourced, found by the names that drivers use."""

import pytest

from online.features.sheets.deployment import find
from tests.support.sheet_cases import shipped_sheets

SHEETS = shipped_sheets()


@pytest.mark.parametrize("sheet", SHEETS.values(), ids=lambda sheet: sheet.name)
def test_every_sheet_names_its_source_and_has_the_numbers_that_features_need(sheet):
    assert "data sheet" in sheet.source
    assert {"fp16", "fp32"} <= set(sheet.tflops)
    assert sheet.sm_count
    assert sheet.host_link_gb_s
    assert sheet.peak_tflops("bfloat16") > sheet.tflops["fp32"]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("h100", "H100-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80-PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD_Instinct_MI355_OAM", "MI355X"),
        ("nvidia-tesla-a100", "A100-40"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2"),
    ],
)
def test_the_names_drivers_use_find_their_sheet(gpu, name):
    assert find(SHEETS, gpu).name == name
    assert all(find(SHEETS, each).name == each for each in SHEETS)


@pytest.mark.parametrize("gpu", ["NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "RTX 4090 Laptop GPU", "Tesla V100S"])
def test_a_part_of_a_gpu_and_a_namesake_of_another_speed_have_no_sheet(gpu):
    assert find(SHEETS, gpu) is None

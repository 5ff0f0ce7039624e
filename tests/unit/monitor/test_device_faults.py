"""Device faults: which reports show that the hardware must be replaced."""

import pytest

from ftrun.monitor.device_faults import is_hardware_text, recovery_report, xid_report


@pytest.mark.parametrize("code", [46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 144, 150, 158, 160])
def test_an_xid_that_needs_a_reset_or_a_repair_is_a_fault(code: int) -> None:
    assert xid_report("GPU 2", code, count=1).is_fault


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 68, 94, 121, 137, 154])
def test_an_xid_that_a_program_may_cause_is_no_fault(code: int) -> None:
    assert not xid_report("GPU 2", code, count=1).is_fault


def test_a_second_contained_error_of_one_gpu_is_a_fault() -> None:
    assert xid_report("GPU 2", 94, count=2).is_fault
    assert not xid_report("GPU 2", 31, count=9).is_fault


def test_the_report_names_the_device_the_code_and_its_meaning() -> None:
    assert xid_report("GPU 2", 79, count=1).text == (
        "GPU 2 has reported XID 79 (the GPU has fallen off the bus)"
    )
    assert xid_report("a GPU", 31, count=1).text == "a GPU has reported XID 31"
    assert recovery_report("GPU 1", 2) == ("GPU 1 needs a restart of the machine", True)
    assert recovery_report("GPU 1", 99).text == "GPU 1 needs action 99"


def test_a_text_of_the_driver_is_a_fault_and_one_of_a_program_is_none() -> None:
    assert is_hardware_text("RuntimeError: CUDA error: uncorrectable ECC error encountered")
    assert is_hardware_text("RuntimeError: No CUDA-capable device is detected")
    assert not is_hardware_text("RuntimeError: CUDA error: an illegal memory access")
    assert not is_hardware_text("ValueError: the batch is empty")

"""The exactness tests of the processor, with all their tensors on the device.

The default device is the fake one, so the tests and their trainings are the same. Without --full
each runs once, in the default stream of a device that runs as late as it may.
"""

from collections.abc import Iterator

import pytest
import torch
from fake_device import fake

from tests.integration.test_capture_and_restore import (  # noqa: F401 - collected here
    run,
    test_a_group_added_later_gets_new_memory,
    test_a_plain_loop_discards_nothing_and_skips_nothing,
    test_a_restored_run_continues_in_the_same_memory_and_ends_the_same,
    test_a_softly_updated_target_network_is_copied_at_the_boundary,
    test_a_step_that_no_hook_sees_is_found,
    test_an_optimizer_inside_the_backward_waits_for_the_copy,
    test_batchnorm_and_an_average_of_the_model_are_saved_as_they_were,
    test_everything_comes_back_into_fresh_objects,
    test_new_memory_behind_a_parameter_is_found,
    test_nothing_is_taken_in_the_middle_of_an_accumulation,
    test_weights_clipped_after_the_step_are_no_harm,
    test_weights_clipped_through_data_before_the_forward_are_found,
)
from tests.integration.test_optimizers_and_overwrites import (  # noqa: F401
    test_an_inner_optimizer_comes_back,
    test_flags_and_groups_set_after_attach_give_way_to_the_restored_ones,
    test_parameters_that_are_replaced_after_attach_get_the_restored_values,
    test_the_gradients_of_an_inner_optimizer_count_as_accumulation,
    test_what_is_loaded_after_attach_gives_way_to_the_restored_state,
)
from tests.integration.test_state_contents import (  # noqa: F401
    is_deterministic,
    test_a_parameter_without_a_gradient_stays_without_one,
    test_an_expanded_buffer_that_was_replaced_gets_memory_of_its_own,
    test_an_unused_parameter_with_a_gradient_of_zeros_is_moved_by_momentum,
    test_arrays_and_tensors_among_plain_values_keep_their_strides,
    test_buffers_that_appear_and_grow_come_back,
    test_buffers_that_are_replaced_come_back_with_their_strides_and_persistence,
    test_flags_of_modules_and_tensors_come_back,
    test_lazy_modules_get_their_shape_from_the_snapshot,
    test_lbfgs_whose_lists_grow_ends_the_same,
    test_moments_of_channels_last_parameters_keep_their_strides,
    test_nested_state_comes_back_as_it_was_at_the_boundary,
    test_state_of_the_optimizer_as_a_whole_comes_back,
    test_tensors_with_two_values_per_byte_come_back_in_every_bit,
    test_what_a_module_adds_to_its_state_dict_comes_back,
)

DEVICE = torch.device("privateuseone", 0)  # its name "fake" is unknown while tests are collected


@pytest.fixture(
    autouse=True,
    params=[
        "lazy-default",
        pytest.param("lazy-own", marks=pytest.mark.full),
        pytest.param("threads-own", marks=pytest.mark.full),
    ],
)
def on_the_device(request: pytest.FixtureRequest, idle_device: None) -> Iterator[None]:
    """The order in which the device runs what is queued, and the stream of the training."""
    mode, _, stream = request.param.partition("-")
    fake.set_mode(mode, seed=7, max_pause_us=500)
    torch.set_default_device(DEVICE)
    try:
        with torch.Stream(DEVICE) if stream == "own" else torch.accelerator.current_stream(DEVICE):
            yield
    finally:
        torch.set_default_device(None)

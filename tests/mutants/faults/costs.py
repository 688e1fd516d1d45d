"""What work is priced by: figures of a machine, and how they were measured."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ANALYTIC = "tests/cost/test_analytic.py::"

FAULTS = (
    Fault(
        "what a CPU computes by polynomials costs no more than to stream it",
        "fxzero/cost/analytic.py",
        "seconds += work.num_transcendental / device.transcendental_per_s",
        "seconds += 0.0",
        f"{_ANALYTIC}test_what_a_cpu_computes_by_polynomials_takes_longer_than_to_stream_it",
    ),
    Fault(
        "attention and convolutions are as fast as a product",
        "fxzero/cost/analytic.py",
        "(flops + lost) / (peak * shares[kind])",
        "(flops + lost) / (peak * device.flops_efficiency)",
        f"{_ANALYTIC}test_operators_reach_their_own_shares_of_the_peak",
    ),
    Fault(
        "a small product loses as many FLOPs in every dtype",
        "fxzero/cost/analytic.py",
        "lost = device.half_peak_flops * peak / fastest",
        "lost = device.half_peak_flops",
        f"{_ANALYTIC}test_a_small_product_takes_as_long_in_every_dtype",
    ),
    Fault(
        "a CPU computes what a causal mask hides",
        "fxzero/cost/attention.py",
        "return (within * seen / num_keys + num_queries - within) / num_queries",
        "return 1.0",
        f"{_ANALYTIC}test_a_cpu_leaves_out_blocks_of_keys_that_a_causal_mask_hides",
    ),
    Fault(
        "products of two dtypes are taken as fake tensors take them",
        "fxzero/compiler/compilation.py",
        "refuse_mixed_products(module.graph)",
        "pass",
        "tests/graph/test_products.py::test_a_product_of_two_dtypes_is_refused_where_it_is_made",
    ),
    Fault(
        "a CPU's updates go by what its layers stream",
        "fxzero/cost/analytic.py",
        'if device.type == "cpu" and has_host:',
        'if device.type == "cuda" and has_host:',
        f"{_ANALYTIC}test_a_cpu_updates_as_its_host_does",
    ),
    Fault(
        "a machine is as fast as it was for a moment",
        "fxzero/doctor/compute.py",
        "return [Product(2.0 * width**3, median(found))",
        "return [Product(2.0 * width**3, min(found))",
        "tests/doctor/test_compute.py::test_the_middle_one_of_a_products_times_counts",
    ),
    Fault(
        "an error of a backend stays in the process that raised it",
        "fxzero/_compat/dynamo.py",
        '            "__reduce__": reduce,\n',
        "",
        "tests/compat/test_dynamo.py::test_an_error_that_passes_through_dynamo_goes_to_other_processes",
    ),
)

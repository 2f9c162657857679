"""pytest plug-in of `make test-windows`: tests that Wine cannot run, with their reasons."""

from fnmatch import fnmatch

import pytest

LINKS = "symbolic links are not made, although the function succeeds"
CLUSTER = "distributed.LocalCluster hangs at its start"
POOL = "concurrent.futures.ProcessPoolExecutor hangs, because a read of zero bytes removes an empty message from a pipe"
DXGI = "ONNX Runtime prints an error, because DXGI is missing"
GAPS = {
    "tests/backends/test_qnn_library.py::test_stdout_is_for_data": DXGI,
    "tests/compile/test_compiler.py::test_checkpoint_is_identified_by_its_content*": LINKS,
    "tests/checkpoints/test_hub.py::test_cached_model_is_found_without_network_and_client": LINKS,
    "tests/checkpoints/test_hub.py::test_incomplete_model_is_not_found": LINKS,
    "tests/checkpoints/test_hub.py::test_folder_of_one_gguf_file_is_that_file": LINKS,
    "tests/checkpoints/test_hub.py::test_only_the_requested_quantisation_is_fetched": LINKS,
    "tests/checkpoints/test_hub.py::test_safetensors_repository_is_fetched_without_unread_files": LINKS,
    "tests/cli/test_calibrate_dask.py::test_shards_give_the_ranges_of_one_machine*": CLUSTER,
    "tests/cli/test_calibrate_dask.py::test_worker_with_other_weights_is_one_line": CLUSTER,
    "tests/engine/test_deploy.py::test_contexts_are_compiled_in_several_processes": POOL,
    "tests/simulate/test_dask_cluster.py::test_its_rows_are_those_of_this_process": CLUSTER,
    "tests/simulate/test_dask_cluster.py::test_a_client_is_taken_and_stays_open": CLUSTER,
    "tests/simulate/test_dask_cluster.py::test_the_search_runs_there": CLUSTER,
    "tests/simulate/test_dask_cluster.py::test_errors_of_a_worker_are_raised_by_the_caller": CLUSTER,
    "tests/simulate/test_dask_cluster.py::test_a_worker_that_fails_prints_one_line": CLUSTER,
    "tests/simulate/test_dask_cluster.py::test_an_interrupt_ends_it": CLUSTER,
    "tests/simulate/test_dask_cluster.py::test_a_cluster_without_workers_prints_one_line": CLUSTER,
    "tests/simulate/test_experiments.py::test_many_workers_give_the_rows_of_one_and_report_progress": POOL,
    "tests/simulate/test_experiments.py::test_an_interrupt_ends_the_experiment_and_its_workers?2?": POOL,
    "tests/simulate/test_tune.py::test_a_mix_of_prompts_is_a_file_or_drawn*": POOL,
    "tests/tokenizer/test_damaged_vocabularies.py::test_a_*link_to_a_missing_file_is_an_error*": LINKS,
}
"""Reasons by a pattern of the test's name, such as tests/cli/test_serve.py::test_*."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in GAPS.items():
            if fnmatch(item.nodeid, pattern):
                item.add_marker(pytest.mark.skip(reason=f"Wine: {reason}"))

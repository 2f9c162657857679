"""Devices on which almost nothing takes time, for costs that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chunkrt.simulate import DeviceProfile
from chunkrt.simulate.profile import OperatorCost, ProcessorCost

FREE = OperatorCost(fixed_us=0.0, gb_per_s=1e15, gops=1e15)
Slow = Mapping[str, Mapping[str, float]]
"""Costs that kinds of operators have in place of those of FREE."""


def free_device(device: DeviceProfile, *, npu: Slow | None = None, cpu: Slow | None = None) -> DeviceProfile:
    def processor(cost: ProcessorCost, slow: Slow | None) -> ProcessorCost:
        others = {kind: replace(FREE, **costs) for kind, costs in (slow or {}).items()}
        return replace(cost, task_us=0.0, operators=dict.fromkeys(cost.operators, FREE) | others)

    return replace(
        device,
        prompt_us=0.0,
        npu=processor(device.npu, npu),
        cpu=processor(device.cpu, cpu),
        memory=replace(device.memory, gb_per_s=1e15),
        transfer=replace(device.transfer, fixed_us=0.0, gb_per_s=1e15),
    )

"""The step graph: its nodes' stamps, its transfers, and the rules that always hold."""

from fxzero.graph.stamps import Lane, Phase, Role, Segment, Stamp
from fxzero.graph.step_graph import StepGraph

__all__ = ["Lane", "Phase", "Role", "Segment", "Stamp", "StepGraph"]

"""What things take: costs of compute and of collectives, analytic, measured or fixed."""

from fxzero.cost.analytic import AnalyticCosts
from fxzero.cost.cluster import ClusterSpec, DeviceSpec, LinkSpec, guess_cluster, load_cluster
from fxzero.cost.model import CostModel, FixedCosts, TransferCost

__all__ = [
    "AnalyticCosts",
    "ClusterSpec",
    "CostModel",
    "DeviceSpec",
    "FixedCosts",
    "LinkSpec",
    "TransferCost",
    "guess_cluster",
    "load_cluster",
]

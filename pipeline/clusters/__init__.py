"""Which chains are alike: the cluster ids that sampling weights are divided by. AF3 SI 2.5.3."""

from megafold.pipeline.clusters.assign import Clustering, IdenticalSequences, Proteins, assign_clusters
from megafold.pipeline.clusters.file import ClusterFile
from megafold.pipeline.clusters.mmseqs import Mmseqs
from megafold.pipeline.clusters.setting import choose_clustering

__all__ = [
    "ClusterFile",
    "Clustering",
    "IdenticalSequences",
    "Mmseqs",
    "Proteins",
    "assign_clusters",
    "choose_clustering",
]

"""What does a lossy technique cost in quality?"""

from membound.runtime.quality.divergence import divergence

__all__ = ["divergence"]

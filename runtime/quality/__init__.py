"""What does a lossy technique cost in quality?"""

from membound.runtime.quality.divergence import divergence, english_kl

__all__ = ["divergence", "english_kl"]

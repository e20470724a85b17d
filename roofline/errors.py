"""What does a person read when the input is wrong?"""


class MemboundError(ValueError):
    """An error in what a person gave: one sentence that names the field, the value and what would be right."""

"""How long does an operator take, and who says so?"""

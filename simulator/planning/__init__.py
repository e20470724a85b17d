"""Which deployment serves a load, and what does it cost?"""

"""What does a scenario come to over a range of values?"""

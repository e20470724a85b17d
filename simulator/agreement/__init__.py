"""Do published results come out?"""

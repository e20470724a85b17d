"""What should change first at an operating point?"""

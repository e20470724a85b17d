"""What do techniques gain together?"""

"""What do guesses yield and cost?"""

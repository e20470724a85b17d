"""What did a run come to?"""

"""What the experiments measure and share: attention, masks, models and training steps of several
ranks.
"""

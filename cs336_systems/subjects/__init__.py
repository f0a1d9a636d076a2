"""Operations that several experiments measure: attention, masks, models, steps of several ranks."""

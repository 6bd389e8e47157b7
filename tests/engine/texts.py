"""Texts by hand, for what goes by profiles."""

from collections.abc import Sequence

from engine.profile import ProfiledToken

Routes = Sequence[Sequence[int]]
"""[L][K]"""


def token(
    routes: Routes,
    *,
    draft_routes: Routes | None = None,
    is_drafted: bool = True,
    confidence: float = 1.0,
    guesses: Sequence[Routes] = (),
) -> ProfiledToken:
    """A token that the draft routes as the model does, if nothing else is said."""
    return ProfiledToken(
        routes=[list(experts) for experts in routes],
        draft_routes=[list(experts) for experts in (routes if draft_routes is None else draft_routes)],
        is_drafted=is_drafted,
        confidence=confidence,
        guesses=[[list(experts) for experts in ahead] for ahead in guesses],
    )

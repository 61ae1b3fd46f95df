"""What a person sets on the page: tau and exact mode in mid-answer, models, profiles, the key."""

from __future__ import annotations

from support.missing import need
from support.page import LONG, Open, ended, runs, slide, write

need("uvicorn", "serve")

from support.fake_serve import FakeServe, tokens_of  # noqa: E402


def test_tau_in_mid_answer(visit: Open) -> None:
    """The control request is seen, and later steps take what the new tau lets through."""
    fake = FakeServe([tokens_of(LONG)], pace=0.05)
    tab = visit(fake)
    slide(tab, 1)
    write(tab, "go")
    tab.locator("article .t").nth(3).wait_for()
    slide(tab, 0.5)
    tab.locator(".mark").get_by_text("tau 0.50").wait_for()
    slide(tab, 0.9)
    tab.locator(".mark").get_by_text("tau 0.90").wait_for()
    fake.pace = 0
    ended(tab)
    assert (fake.requests[0]["tau"], "exact" in fake.requests[0]) == (1, False)
    assert fake.controls == [{"tau": 0.5}, {"tau": 0.9}]
    made = runs(tab)
    assert made[:3] == [1, 1, 1]
    assert max(made) == 8
    assert made[-1] <= 5, "at 0.9 every fifth word ends a run"
    assert "tau 0.90" in tab.locator("article .mode").inner_text()
    assert tab.locator("article .text").inner_text().replace("tau 0.50", "").replace("tau 0.90", "") == LONG


def test_the_key_is_asked_for_and_kept_for_the_tab(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")], key="secret")
    tab = visit(fake)
    assert "wants an API key" in tab.get_by_role("dialog", name="Settings").inner_text()
    tab.get_by_label("API key").fill("secret")
    tab.get_by_role("button", name="Done").click()
    tab.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    write(tab, "go")
    ended(tab)
    assert tab.locator("article .text").inner_text() == "fine"
    kept = tab.context.storage_state()
    assert "secret" not in str(kept), "nothing that outlives the tab"


def test_models_and_profiles(visit: Open) -> None:
    fake = FakeServe([tokens_of("fine")])
    tab = visit(fake)
    models = tab.get_by_role("combobox", name="Model")
    models.locator("option").nth(1).wait_for(state="attached")
    assert models.locator("option").all_inner_texts() == ["tiny", "other (not loaded)"], (
        "profiles have a chooser of their own"
    )
    tab.get_by_role("combobox", name="Profile").select_option("assistant")
    write(tab, "go")
    ended(tab)
    assert fake.requests[0]["profile"] == "assistant"
    assert not {"tau", "exact"} & fake.requests[0].keys()
    tab.get_by_role("combobox", name="Profile").select_option("by load")
    write(tab, "go")
    ended(tab)
    assert not {"tau", "exact", "profile"} & fake.requests.pop().keys(), "the server chooses"
    models.select_option("other")
    assert tab.get_by_role("combobox", name="Profile").count() == 0
    write(tab, "go")
    ended(tab)
    assert fake.requests[1]["model"] == "other" and fake.requests[1]["exact"] is True
    models.get_by_text("other", exact=True).wait_for(state="attached")
    assert models.locator("option").all_inner_texts() == ["tiny", "other"], "it was loaded for its request"

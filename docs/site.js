// Wide tables scroll on a phone: by keyboard as well.
document$.subscribe(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => (each.tabIndex = 0)));

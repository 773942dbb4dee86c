// Each block's buttons are a place of their own for those who hear the page.
new MutationObserver(() =>
  document.querySelectorAll(".md-code__nav").forEach((each, n) => (each.ariaLabel = `Code block ${n + 1}`)),
).observe(document, { childList: true, subtree: true });
// Wide tables scroll on a phone: by keyboard as well.
document$.subscribe(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => (each.tabIndex = 0)));

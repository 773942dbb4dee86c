// Each block's buttons are a place of their own for those who hear the page.
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav").forEach((each, n) => (each.ariaLabel = `Code block ${n + 1}`));
  focusScrolledCode();
}).observe(document, { childList: true, subtree: true });
// Wide tables scroll on a phone: by keyboard as well.
document$.subscribe(() => document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => (each.tabIndex = 0)));
// The keyboard scrolls a code block only if the block can have the focus. The theme does this only for a mouse.
function focusScrolledCode() {
  document
    .querySelectorAll(".md-typeset pre > code")
    .forEach((each) => each.scrollWidth > each.clientWidth && (each.tabIndex = 0));
}
addEventListener("resize", focusScrolledCode);
addEventListener("change", focusScrolledCode); // another tab shows other blocks

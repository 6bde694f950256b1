// The theme adds scrolling tables and copy buttons after the page is there. Both need a name or a
// place in the tab order: else a keyboard does not reach what is cut off.
function reachable() {
  const scrolling = ".md-typeset__scrollwrap, .md-typeset pre > code"
  for (const each of document.querySelectorAll(scrolling)) each.tabIndex = 0
  document.querySelectorAll(".md-code__nav").forEach((nav, n) => {
    const name = `Code ${n + 1}`
    if (nav.ariaLabel !== name) nav.ariaLabel = name
  })
}
reachable()
new MutationObserver(reachable).observe(document.body, { childList: true, subtree: true })

// Typesets every formula of the page. What KaTeX does not understand stops the tests of the pages.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\[") });
}

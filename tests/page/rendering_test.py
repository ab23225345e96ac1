"""What the page makes of an answer's text: Markdown, code, formulas, and what must stay text."""
from page_case import ScriptedTest
from scripted_server import LONG_ANSWER


class Rendering(ScriptedTest):
    def test_markdown(self):
        page = self.page
        page.ask("document")
        within = lambda selector: page.texts(".message.assistant .prose " + selector)
        self.assertEqual(within("h2"), ["Reading a file line by line"])
        self.assertEqual(within("thead th"), ["way", "memory", "speed"])
        self.assertEqual(within("tbody tr:nth-child(2) td"),
                         ["readlines()", "the whole file, as a list", "1.3"])
        self.assertEqual(within("td.right"), ["1.0", "1.3", "1.1"])
        self.assertEqual(within("em"), ["what they hold in memory"])
        self.assertEqual(within("ol > li > ul > li"),
                         ["tabs count as white space,", "so does the newline at the end."])
        self.assertEqual(within("blockquote"), ["A generator would let the caller stop early."])
        link = page.last(".prose a")
        self.assertIn("noopener", link.get_attribute("rel"))
        self.picture("document.png")
        page.click("Copy", ".code")
        copied = page.driver.execute_async_script(
            "navigator.clipboard.readText().then(arguments[0], (e) => arguments[0](String(e)))")
        self.assertEqual(copied, LONG_ANSWER.split("```")[1].removeprefix("python\n").rstrip("\n"))
        page.wait(lambda: page.text(".code button") == "Copied", "the button to say so")

    def test_code_is_coloured(self):
        page = self.page
        page.ask("document")
        kinds = lambda kind: page.texts(f".code .{kind}")
        self.assertIn("def", kinds("keyword"))
        self.assertEqual(kinds("comment"), ["# one line at a time"])
        self.assertEqual(kinds("string"), ['"utf-8"'])
        self.assertEqual(kinds("number"), ["0", "1"])
        self.assertIn("count_words", kinds("called"))
        code = LONG_ANSWER.split("```")[1].removeprefix("python\n").rstrip("\n")
        self.assertEqual(page.js("return document.querySelector('.code code').textContent"), code)
        # Every language keeps every character, whatever it is.
        hostile = "a \"b\\\" 'c ` /* // # -- <!-- <a href='x'> 0x1F $ \\ @@ +1 \n-2 </b> " * 3
        for language in ("c++", "js", "python", "rust", "go", "bash", "sql", "json", "yaml", "css", "html",
                         "diff", "unknown", ""):
            self.server.answer = f"```{language}\n{hostile}\n```"
            page.click("New conversation")
            page.send("whole")
            page.wait_idle()
            self.assertEqual(page.js("return document.querySelector('.code code').textContent"), hostile,
                             language)

    def test_formulas(self):
        page = self.page
        page.ask("formulas")
        drawn = lambda: page.js("return [...document.querySelectorAll('.prose .math math')].map((e) =>"
                                "e.querySelector('annotation').textContent.trim())")
        self.assertEqual(drawn(), [
            "ax^2 + bx + c = 0", r"x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}", "a = 1",
            "\\sum_{k=1}^{n} k\n= \\frac{n(n+1)}{2}\n+ 0", r"\alpha \le \beta",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\href{javascript:alert(1)}{x}"])
        self.assertEqual(len(page.all(".math.display math")), 2)
        self.assertGreater(page.js("return document.querySelector('.math.display mfrac')"
                                   ".getBoundingClientRect().height"), 20)
        # What KaTeX refuses stays as it was written, and so does what is none.
        self.assertEqual(page.texts(".math.raw"), [r"$\frac{1}{$"])
        self.assertEqual(page.all(".math [href], .math [style]"), [])
        self.assertIn("It costs $5 and not $10, or $5-$10.", page.answers()[-1])
        self.assertEqual(page.texts(".prose :not(pre) > code"), ["$code$"])
        self.assertIn("so does $a$.", page.answers()[-1])
        self.assertEqual(page.all(".prose a"), [])
        self.picture("formulas.png")
        # A formula that is being written is text until it ends; what is too much is text too.
        self.server.answer = "$x$ " * 3000
        page.click("New conversation")
        page.send("whole")
        page.wait_idle()
        self.assertEqual(len(page.all(".math math")), 400)

    def test_what_a_model_wrote_is_never_markup(self):
        page = self.page
        hostile = ["<script>document.title = 'bad'</script>", "<img src=x onerror=alert(1)>",
                   "[click](javascript:alert(1))", "![picture](https://example.org/a.png)",
                   "[data](data:text/html,x)", "<b style=color:red>bold</b>", "[x](https://a.b \"t\")"]
        text = "Look: " + " and ".join(hostile)
        page.ask("echo " + text)
        self.assertIn(hostile[0], page.answers()[-1])
        self.assertIn("[click](javascript:alert(1))", page.answers()[-1])
        made = page.js("return [...document.querySelectorAll('.message.assistant > .prose *')]"
                       ".map((e) => e.tagName + ' ' + (e.getAttribute('href') ?? ''))")
        self.assertEqual(made, ["P ", "A https://example.org/a.png", "A https://a.b/"])
        self.assertEqual(page.driver.title, f"{('echo ' + text)[:60].strip()} · Fathom")

    def test_marks_that_never_close_stay_text_and_cost_little(self):
        page = self.page
        for text in ("**a " * 20000, "> " * 20000, "[" * 50000, "`a ``b " * 9000, "| - " * 9000,
                     "- " * 20000 + "a", "*_" * 20000, "$a " * 20000, "$$\n" * 20000, "\\[\n" * 20000,
                     "$a$" * 20000, "```c\n" + "/*'\"" * 9000, "```html\n" + "<a b='" * 9000):
            before = page.cpu_seconds()
            self.server.answer = text
            page.click("New conversation")
            page.send("whole")
            page.wait_idle()
            shown = page.js("return document.querySelector('.message.assistant > .prose').textContent")
            self.assertGreater(len(shown), 0)
            self.assertLess(page.cpu_seconds() - before, 5, text[:10])

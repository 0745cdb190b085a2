# Doxygen's input filter for .md files, which are written for GitHub. Code spans and code blocks stay as they are.
# - $...$, $`...`$, $$...$$ and ```math blocks become \f$...\f$ and \f[...\f]. An opening $ is followed, and a closing one
#   preceded, by something other than a space, and no digit follows a closing one: GitHub's rule, which spares prices.
# - Lines of <details>, <summary> and their closing tags alone are passed through to the page, for Doxygen takes them apart.
# - A link to a file that is no page of the site leads to the file in the checkout.
# - Pages and headings get anchors: the ids that GitHub gives them, with the page's path in front, for an id must be unique in the site.
BEGIN { fence = ""; display = 0 }

# The folder of the file, relative to the top of the checkout, from where Doxygen runs.
FNR == 1 {
    folder = FILENAME
    if (index(folder, ENVIRON["PWD"] "/") == 1) folder = substr(folder, length(ENVIRON["PWD"]) + 2)
    page = folder
    sub(/[^\/]*$/, "", folder)
}

# The id of a heading: `heading` is its text, or what follows # in a link.
function id(path, heading) {
    sub(/\.md$/, "", path)
    heading = tolower(heading)
    gsub(/[^a-z0-9 _-]/, "", heading)
    gsub(/ /, "-", heading)
    gsub(/[^A-Za-z0-9]/, "_", path)
    return path "-" heading
}

# The target of a link, as the site needs it. Pages are linked by their anchors: Doxygen cannot link a file whose path has a space.
function target(path,    at, heading) {
    if (path ~ /^[a-z]+:/) return path
    if (path ~ /^#/) return "#" id(page, substr(path, 2))
    heading = ""
    if (path ~ /\.md#/) {
        at = index(path, "#")
        heading = substr(path, at + 1)
        path = substr(path, 1, at - 1)
    }
    path = folder path
    while (sub(/[^\/]+\/\.\.\//, "", path)) {}
    if (path ~ /^(README|CONTRIBUTING|(docs|steps|common)\/.*)\.md$/) return "#" id(path, heading)
    return "../../../" path
}

# Rewrites the links; of an image only the file's name stays, by which Doxygen finds it in IMAGE_PATH. The text of a link may
# begin on the line before. What looks like a link inside a code
# span would be rewritten as well.
function links(text,    result, before, path, end) {
    result = ""
    while (match(text, /\]\([^() ]+\)/)) {
        before = substr(text, 1, RSTART - 1)
        path = substr(text, RSTART + 2, RLENGTH - 3)
        end = RSTART + RLENGTH
        if (before !~ /!\[[^[]*$/) path = target(path)
        else sub(/.*\//, "", path)
        result = result before "](" path ")"
        text = substr(text, end)
    }
    return result text
}

# Replaces **, which Doxygen leaves as it is around a formula. What is bold may end on a later line of its paragraph.
function strong(text) {
    while (sub(/\*\*/, bold ? "</b>" : "<b>", text)) bold = !bold
    return text
}

# Replaces the inline math of text that holds no code span.
function inline(text,    result, open, rest, close_at, i, before, after) {
    result = ""
    # Doxygen takes what stands between quotation marks for one word, formulas and all.
    gsub(/"/, "\\&quot;", text)
    while ((open = index(text, "$")) > 0) {
        before = substr(text, open - 1, open > 1)
        rest = substr(text, open + 1)
        close_at = 0
        if (before != "\\" && rest !~ /^[[:space:]$]/) {
            for (i = 2; i <= length(rest); i++) {
                if (substr(rest, i, 1) != "$" || substr(rest, i - 1, 1) ~ /[\\[:space:]]/) continue
                after = substr(rest, i + 1, 1)
                if (after ~ /[0-9]/) continue
                close_at = i
                break
            }
        }
        if (close_at) {
            result = result strong(substr(text, 1, open - 1)) "\\f$" substr(rest, 1, close_at - 1) "\\f$"
            text = substr(rest, close_at + 1)
        } else {
            result = result strong(substr(text, 1, open))
            text = rest
        }
    }
    return result strong(text)
}

# Splits a line at its code spans and display formulas.
function line(text,    result, tick, math, run, close_at) {
    result = ""
    while (1) {
        if (display) {
            close_at = index(text, "$$")
            if (!close_at) return result text
            result = result substr(text, 1, close_at - 1) "\\f]"
            text = substr(text, close_at + 2)
            display = 0
            continue
        }
        tick = match(text, /`+/) ? RSTART : 0
        run = RLENGTH
        math = index(text, "$$")
        if (math && (!tick || math < tick)) {
            result = result inline(substr(text, 1, math - 1)) "\\f["
            text = substr(text, math + 2)
            display = 1
            continue
        }
        if (!tick) return result inline(text)
        if (tick > 1 && substr(text, tick - 1, 1) == "$" && (close_at = index(substr(text, tick + run), "`$"))) {
            result = result inline(substr(text, 1, tick - 2)) "\\f$" substr(text, tick + run, close_at - 1) "\\f$"
            text = substr(text, tick + run + close_at + 1)
            continue
        }
        close_at = index(substr(text, tick + run), substr(text, tick, run))
        if (!close_at) return result inline(text)
        result = result inline(substr(text, 1, tick - 1)) substr(text, tick, run + close_at - 1 + run)
        text = substr(text, tick + run + close_at - 1 + run)
    }
}

{
    if ($0 ~ /^[[:space:]]*$/) bold = 0
    marker = $0
    sub(/^[[:space:]>]*/, "", marker)
    if (fence == "" && !display && match(marker, /^(```+|~~~+)/)) {
        fence = substr(marker, 1, RLENGTH)
        formula = marker ~ /^```math[[:space:]]*$/
        print formula ? "\\f[" : $0
    } else if (fence != "" && index(marker, fence) == 1 && marker ~ /^(`+|~+)[[:space:]]*$/) {
        print formula ? "\\f]" : $0
        fence = ""
    } else if (fence != "") {
        print
    } else if (marker ~ /^(<\/?(details|summary)>|<summary>.*<\/summary>|[[:space:]])+$/) {
        print "\\htmlonly[block]" marker "\\endhtmlonly"
    } else if (FNR == 1 && $0 ~ /^# /) {
        print line(links($0)) "\n\n\\anchor " id(page, "")
    } else if ($0 ~ /^##+ / && !display) {
        heading = $0
        sub(/^#+ */, "", heading)
        # Not as {#id} behind the heading: see TOC_INCLUDE_HEADINGS in the Doxyfile.
        print "\\anchor " id(page, heading) "\n\n" line(links($0))
    } else {
        print line(links($0))
    }
}

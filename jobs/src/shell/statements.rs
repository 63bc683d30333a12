//! A script as its statements, before variables are put in: what the shell's separators, quotes,
//! comments and here-documents make of the text.

use super::Wrong;

/// A statement: a command with its assignments, before variables are put in.
pub(super) struct Statement {
    pub line: usize,
    pub text: String,
    pub after_and: bool,
    pub after_or: bool,
}

/// The words of `#SBATCH` lines.
pub(super) fn sbatch(text: &str) -> impl Iterator<Item = Result<(usize, Vec<String>), Wrong>> {
    let lines = text.lines().enumerate();
    let of = lines.filter_map(|(i, l)| Some((i + 1, l.trim_start().strip_prefix("#SBATCH")?)));
    of.map(|(line, rest)| {
        let words = shlex::split(rest).ok_or_else(|| Wrong {
            line,
            problem: "a quote of this #SBATCH line is not closed".into(),
        })?;
        Ok((line, words))
    })
}

/// Cuts a script into statements: at ends of lines, `;`, `&&`, `||`, `|` and `&` that are neither
/// quoted nor in parentheses. Comments and here-documents are left out.
pub(super) fn statements(text: &str) -> Result<Vec<Statement>, Wrong> {
    let chars: Vec<char> = text.chars().collect();
    let mut all = Vec::new();
    let mut now = String::new();
    let (mut line, mut start) = (1, 1);
    let (mut single, mut double, mut back) = (false, false, false);
    let (mut quote_line, mut paren_line) = (1, 1);
    let mut depth = 0usize;
    let (mut after_and, mut after_or) = (false, false);
    let mut heredocs: Vec<String> = Vec::new();
    let mut i = 0;
    while i < chars.len() {
        let c = chars[i];
        let next = chars.get(i + 1).copied();
        if c == '\n' {
            line += 1;
        }
        if now.trim().is_empty() {
            start = line;
        }
        if single {
            single = c != '\'';
            now.push(c);
            i += 1;
            continue;
        }
        match c {
            '\\' => {
                match next {
                    Some('\n') => {
                        line += 1;
                        now.push(' ');
                        i += 2;
                        continue;
                    }
                    Some('\r') if chars.get(i + 2) == Some(&'\n') => {
                        line += 1;
                        now.push(' ');
                        i += 3;
                        continue;
                    }
                    Some(' ' | '\t') if !double => {
                        let mut j = i + 1;
                        while matches!(chars.get(j), Some(' ' | '\t')) {
                            j += 1;
                        }
                        if matches!(chars.get(j), Some('\n' | '\r') | None) {
                            return Err(Wrong {
                                line,
                                problem: "a blank stands behind the backslash, so the shell ends the command on this line".into(),
                            });
                        }
                    }
                    _ => {}
                }
                now.push(c);
                now.extend(next);
                i += 2;
                continue;
            }
            '\'' if !double => {
                single = true;
                quote_line = line;
            }
            '"' => {
                double = !double;
                quote_line = line;
            }
            '`' => back = !back,
            '(' if !double || now.ends_with('$') || depth > 0 => {
                if depth == 0 {
                    paren_line = line;
                }
                depth += 1;
            }
            ')' if depth > 0 => depth -= 1,
            _ => {}
        }
        let is_open = double || back || depth > 0;
        let begins_word =
            now.is_empty() || now.ends_with(char::is_whitespace) || now.ends_with('(');
        if c == '#' && !double && !back && begins_word {
            while i < chars.len() && chars[i] != '\n' {
                i += 1;
            }
            continue;
        }
        if c == '<'
            && next == Some('<')
            && !is_open
            && chars.get(i + 2) != Some(&'<')
            && !now.ends_with('<')
        {
            let mut j = i + 2;
            while matches!(chars.get(j), Some('-' | ' ' | '\t')) {
                j += 1;
            }
            let mut word = String::new();
            while let Some(c) = chars.get(j).filter(|c| !c.is_whitespace() && **c != ';') {
                word.push(*c);
                j += 1;
            }
            heredocs.push(word.trim_matches(['"', '\'']).to_string());
            i = j;
            continue;
        }
        if c == '\n' && depth > 0 && !double {
            now.push(' ');
            i += 1;
            continue;
        }
        let separator = !is_open
            && match c {
                '\n' | ';' | '|' => true,
                '&' => !now.ends_with('>') && next != Some('>'),
                _ => false,
            };
        if !separator {
            now.push(c);
            i += 1;
            continue;
        }
        let doubled = next == Some(c) && matches!(c, '&' | '|' | ';');
        all.push(Statement {
            line: start,
            text: std::mem::take(&mut now),
            after_and,
            after_or,
        });
        (after_and, after_or) = (doubled && c == '&', doubled && c == '|');
        i += 1 + usize::from(doubled);
        if c == '\n' {
            for word in heredocs.drain(..) {
                loop {
                    let end = chars[i..].iter().position(|c| *c == '\n');
                    let own: String = chars[i..].iter().take(end.unwrap_or(usize::MAX)).collect();
                    let Some(end) = end else {
                        i = chars.len();
                        break;
                    };
                    i += end + 1;
                    line += 1;
                    if own.trim() == word {
                        break;
                    }
                }
            }
        }
    }
    if single || double || back {
        return Err(Wrong {
            line: quote_line,
            problem: "the quote that begins on this line is not closed".into(),
        });
    }
    if depth > 0 {
        return Err(Wrong {
            line: paren_line,
            problem: "the parenthesis that opens on this line is not closed".into(),
        });
    }
    all.push(Statement {
        line: start,
        text: now,
        after_and,
        after_or,
    });
    all.retain(|s| !s.text.trim().is_empty());
    Ok(all)
}

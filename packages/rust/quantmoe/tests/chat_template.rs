//! A folder's chat template and special tokens, as Python and transformers read them.

use std::fs;
use std::path::PathBuf;

use quantmoe::ChatTemplate;

fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
    let made = std::env::temp_dir().join(format!("quantmoe-template-{}-{name}", std::process::id()));
    fs::create_dir_all(made.join("additional_chat_templates")).unwrap();
    for (file, text) in files {
        fs::write(made.join(file), text).unwrap();
    }
    made
}

/// Return what a folder's template makes of one message, or the error.
fn rendered(name: &str, files: &[(&str, &str)]) -> String {
    let made = folder(name, files);
    let found = ChatTemplate::open(&made).and_then(|template| template.turn(None, &["a"]));
    fs::remove_dir_all(made).unwrap();
    found.unwrap_or_else(|error| error.0)
}

const CONFIG: &str = "tokenizer_config.json";
const NAMED: &str = "additional_chat_templates/tool_use.jinja";

#[test]
fn special_tokens_map_names_tokens_where_the_config_lists_none() {
    let template = ("chat_template.jinja", "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}");
    let map = ("special_tokens_map.json", r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>"}"#);
    assert_eq!(rendered("map", &[template, map]), "<b><e>a");
    let config = (CONFIG, r#"{"bos_token": "<older>", "eos_token": null}"#);
    assert_eq!(rendered("both", &[template, map, config]), "<b><e>a");
    let listed = (CONFIG, r#"{"bos_token": "<own>", "added_tokens_decoder": {}}"#);
    assert_eq!(rendered("listed", &[template, map, listed]), "<own>a");
}

#[test]
fn the_default_template_is_taken_wherever_it_is() {
    let default = ("chat_template.jinja", "default {{ messages[0].content }}");
    assert_eq!(rendered("beside", &[default, (NAMED, "tools")]), "default a");
    let other = ("additional_chat_templates/default.jinja", "named {{ messages[0].content }}");
    assert_eq!(rendered("named", &[other, (NAMED, "tools")]), "named a");
    let list =
        r#"{"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]}"#;
    assert_eq!(rendered("list", &[(CONFIG, list)]), "listed");
    assert_eq!(rendered("files", &[(CONFIG, list), default]), "default a");
}

#[test]
fn templates_without_a_default_are_refused() {
    let error = rendered("none", &[(NAMED, "tools"), (CONFIG, r#"{"chat_template": "unused"}"#)]);
    assert!(error.ends_with("additional_chat_templates: has no template named default; found: tool_use"), "{error}");
    let error = rendered("list-none", &[(CONFIG, r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#)]);
    assert!(error.ends_with("tokenizer_config.json: has no template named default; found: rag"), "{error}");
    let error = rendered("nothing", &[]);
    assert!(
        error.ends_with("chat_template.jinja: is missing, and tokenizer_config.json has no chat_template"),
        "{error}"
    );
    let error = rendered("number", &[(CONFIG, r#"{"chat_template": 5}"#)]);
    assert!(error.ends_with("tokenizer_config.json: chat_template is no text"), "{error}");
}
